"""Read the autograd graph of the loss: one file per rule about its structure."""
