"""Measure activations: zero and saturated fractions, silent units, modules and functions."""
