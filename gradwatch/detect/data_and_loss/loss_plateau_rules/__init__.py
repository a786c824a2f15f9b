"""Mechanisms of `loss_plateau`, one per file: functions that read a history and return their observations."""
