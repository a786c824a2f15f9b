"""What happened, step by step, in memory and on disk. Everything after the probe reads this and nothing else."""
