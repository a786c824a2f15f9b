"""Reduce tensors where they are (C, Triton or torch operations) and copy one small row to the host."""
