"""Take part in a distributed training: one run directory, and readings that only a comparison of ranks needs."""
