"""Write a run for TensorBoard: scalars, histograms, heat maps and findings as event files."""
