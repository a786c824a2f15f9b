"""Rerun a recorded step: exactly as recorded, with every operation traced, or with one change at a time."""
