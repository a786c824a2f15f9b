"""Detectors of data and loss, GW5xx: one symptom per file."""
