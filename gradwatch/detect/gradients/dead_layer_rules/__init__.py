"""Mechanisms of `dead_layer`: frozen tensors, cliffs over depth, and experts that the router does not choose."""
