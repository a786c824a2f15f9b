"""Training scripts with and without a planted fault, and a scorer for monitors that look for such faults."""
