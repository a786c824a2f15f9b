"""Detectors of gradient flow, GW1xx: one symptom per file."""
