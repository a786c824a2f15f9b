"""The state of a training as plain data: random generators, copies in memory, folders on disk."""
