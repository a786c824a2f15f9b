"""Parts of `no_gradient`: which tensors the loss reached, which move without it, and when a gradient has come."""
