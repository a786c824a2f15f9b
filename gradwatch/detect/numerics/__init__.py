"""Detectors of numerical failures, GW0xx: one symptom per file."""
