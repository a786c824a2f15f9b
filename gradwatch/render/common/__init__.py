"""What several sinks show: run statistics, layer tables, number formats, heat maps."""
