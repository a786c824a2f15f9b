"""Compute the gradient of each sample, and rank the samples of a recorded step by their part in it."""
