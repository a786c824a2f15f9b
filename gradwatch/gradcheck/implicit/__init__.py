"""Check layers that solve for a fixed point: residual, contraction, and the gradient by an adjoint solve."""
