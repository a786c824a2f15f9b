"""Training scripts without a fault, however unusual."""
