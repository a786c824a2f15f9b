"""Handle failures of a training: incidents, rewinding, interrupts, error messages."""
