"""The readings of a step: gradients, updates, activations, loss scale and batch, left on the device that has them."""
