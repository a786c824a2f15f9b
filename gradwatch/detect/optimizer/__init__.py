"""Detectors of optimizer and scaler state, GW4xx: one symptom per file."""
