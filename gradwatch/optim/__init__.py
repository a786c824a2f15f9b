"""Optimizers that watch: torch's own, whose step also measures every gradient, weight and update that it reads."""

from gradwatch.optim.adam import Adam, AdamW
from gradwatch.optim.sgd import SGD
from gradwatch.optim.watched import Watched

__all__ = ["SGD", "Adam", "AdamW", "Watched"]
