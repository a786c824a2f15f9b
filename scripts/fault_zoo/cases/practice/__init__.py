"""Faults as they happen in practice, and runs that look odd, written by somebody who had not read gradwatch."""
