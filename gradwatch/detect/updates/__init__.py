"""Detectors of weight updates, GW3xx: one symptom per file."""
