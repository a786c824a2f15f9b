"""Check the gradient of a training step as it really runs: three methods, a verdict per tensor, and the place."""
