"""Explain the output of a model for one sample by a map of its inputs, and judge the map by experiments."""
