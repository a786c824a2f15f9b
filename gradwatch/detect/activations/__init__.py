"""Detectors of activations, GW2xx: one symptom per file."""
