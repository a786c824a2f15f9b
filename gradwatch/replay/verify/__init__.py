"""Verify a diagnosis: change one thing at a time and check whether the symptom disappears."""
