"""Mechanisms of `learning-rate-too-low`: each file finds one effect of too small updates."""
