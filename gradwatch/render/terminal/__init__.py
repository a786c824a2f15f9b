"""Show runs in the terminal: live view, plain lines, summary, diagnosis, tables of runs."""
