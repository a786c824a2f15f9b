"""Locate the operation, line and samples where a step first became non-finite."""
