"""Mechanisms of `layer_imbalance`, one per file: functions that read a history and return their observations."""
