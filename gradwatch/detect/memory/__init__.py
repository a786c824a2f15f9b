"""Detectors of memory: what is kept for too long, and what does not fit."""
