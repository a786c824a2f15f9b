"""Measure gradients, weights, updates and activations on their device, into one small row per step."""
