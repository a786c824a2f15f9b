"""Mechanisms of `oscillating_gradient`, one per file: functions that read a history and return their observations."""
