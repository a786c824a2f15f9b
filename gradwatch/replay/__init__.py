"""Run a recorded step again: exactly as it was, under a magnifying glass, and with one change at a time."""
