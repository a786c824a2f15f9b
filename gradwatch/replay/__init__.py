"""Rerun a recorded step: exactly as recorded, with every operation traced, and with one change at a time."""
