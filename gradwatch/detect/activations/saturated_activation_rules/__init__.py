"""Mechanisms of `saturated_activation` that read more than activations, one per file."""
