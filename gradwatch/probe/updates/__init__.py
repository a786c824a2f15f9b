"""Measure how far a step moved each weight, from the optimizer's moments or from a copy."""
