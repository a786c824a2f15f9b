"""Detectors of differences between the ranks of a distributed training."""
