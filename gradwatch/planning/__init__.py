"""Plan the memory of a training step before it runs: trace it without data, advise by numbers, write the change."""
