"""Mechanisms of `learning-rate-too-low`: one way in which too small updates show per file."""
