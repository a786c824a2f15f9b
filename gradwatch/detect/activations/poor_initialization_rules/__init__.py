"""Mechanisms of `poor-initialization`: one sign of badly scaled weights at step 0 per file."""
