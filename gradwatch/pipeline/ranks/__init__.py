"""Compare the ranks of a distributed training through the files of one run directory. No torch."""
