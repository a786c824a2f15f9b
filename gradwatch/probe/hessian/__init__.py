"""Multiply by the derivatives of a loss without storing them: Hessian and Jacobian products, curvature, spectrum."""
