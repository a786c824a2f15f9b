"""The terminal sink: live view, plain lines, summary, diagnosis, tables of runs."""
