"""Measure gradients: statistics, histograms, accumulation across steps, gradients of micro-batches."""
