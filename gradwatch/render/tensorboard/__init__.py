"""The TensorBoard sink: scalars, histograms, heat maps and findings as event files."""
