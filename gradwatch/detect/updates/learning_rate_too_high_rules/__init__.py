"""Mechanisms of `learning-rate-too-high`: each file finds one effect of too large updates."""
