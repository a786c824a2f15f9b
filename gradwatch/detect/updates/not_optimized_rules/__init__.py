"""Mechanisms of `not-optimized`: one way in which a parameter gets gradients and does not move per file."""
