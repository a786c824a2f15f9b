"""Measure the digits that a step keeps: every operation next to the same operation in float64."""
