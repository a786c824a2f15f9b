"""Parts of `no_gradient`: which tensors the loss has reached, and when a missing gradient has come."""
