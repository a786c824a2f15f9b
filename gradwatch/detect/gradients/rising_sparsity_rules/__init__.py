"""Mechanisms of `rising_sparsity`: zeros of gradients, silent units of ReLUs, and when an envelope creeps up."""
