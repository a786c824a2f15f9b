"""Mechanisms of `poor-initialization`: each file finds one sign of badly scaled weights at step 0."""
