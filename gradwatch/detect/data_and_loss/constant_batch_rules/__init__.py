"""Mechanisms of `constant_batch`, one per file: functions of a history that return what they have seen."""
