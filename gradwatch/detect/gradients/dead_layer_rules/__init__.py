"""Mechanisms of `dead_layer`: frozen tensors, cliffs over depth, and experts that are merely not chosen."""
