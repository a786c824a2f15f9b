"""Check the gradient of a training step as it really runs: three witnesses, a verdict per tensor, and the place."""
