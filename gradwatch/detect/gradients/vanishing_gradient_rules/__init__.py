"""Mechanisms of `vanishing_gradient`, one per file: functions that read a history and return their observations."""
