"""Mechanisms of `learning-rate-too-high`: one way in which too large updates show per file."""
