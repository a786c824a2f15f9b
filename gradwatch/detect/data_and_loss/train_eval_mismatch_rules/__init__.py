"""Mechanisms and examples of `train_eval_mismatch`."""
