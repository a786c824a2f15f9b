"""Gradients with planted mistakes and right ones that are hard to check, for the benchmark of `gradwatch check`."""
