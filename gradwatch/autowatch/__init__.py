"""Watch an unedited training script: find its models, optimizers, losses and steps."""
