"""Restore a training to the state just before a recorded step."""
