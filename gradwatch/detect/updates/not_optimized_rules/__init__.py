"""Mechanisms of `not-optimized`: each file finds one reason why a parameter with a gradient does not move."""
