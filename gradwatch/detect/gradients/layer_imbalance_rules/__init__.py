"""Mechanisms of `layer_imbalance`, one per file: functions of a history that return what they have seen."""
