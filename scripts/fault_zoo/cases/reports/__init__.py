"""Faults that people reported, rewritten by somebody who had not read gradwatch, and runs that only look odd."""
