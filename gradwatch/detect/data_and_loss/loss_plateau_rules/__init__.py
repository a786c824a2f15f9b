"""Mechanisms of `loss_plateau`, one per file: functions of a history that return what they have seen."""
