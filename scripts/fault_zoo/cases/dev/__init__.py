"""Scripts that were open while gradwatch was written."""
