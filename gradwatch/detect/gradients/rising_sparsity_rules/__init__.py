"""Mechanisms of `rising_sparsity`: zeros in gradients, silent units of ReLUs, and creeping envelopes."""
