"""Train a model from a config: the loop, the optimizer step, and the checkpoints."""
