"""Train a model as a config says: loop, step, checkpoints."""
