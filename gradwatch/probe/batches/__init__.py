"""Inspect batches: repeated samples, input scale, predictions that ignore their targets."""
