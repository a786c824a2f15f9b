"""Mechanisms of `exploding_gradient`, one per file: functions of a history that return what they have seen."""
