"""Compute and format the content that several sinks show: run statistics, layers, numbers, heat maps."""
