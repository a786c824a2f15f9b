"""Process the rows of a live or replayed run on the host: append, write, run detectors, notify sinks."""
