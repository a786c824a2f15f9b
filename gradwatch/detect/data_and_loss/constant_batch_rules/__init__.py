"""Mechanisms of `constant_batch`, one per file: functions that read a history and return their observations."""
