"""Compare one live training step, stage by stage, with the update it was meant to make."""
