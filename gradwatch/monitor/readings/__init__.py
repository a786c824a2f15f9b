"""Read gradients, updates, activations, loss scale and batch of a step, and leave the readings on their device."""
