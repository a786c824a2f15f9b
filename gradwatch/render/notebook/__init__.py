"""Draw a statistic of a run for a notebook."""
