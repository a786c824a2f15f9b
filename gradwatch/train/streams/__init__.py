"""Read batches from streams: datasets without numbered samples, in shards, from a position that a checkpoint holds."""
