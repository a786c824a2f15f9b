"""Map names to activations, as modules so that probes can watch them, and initialize weights to suit them."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import nn

from gradwatch.errors import GradwatchError

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "elu": nn.ELU,
    "selu": nn.SELU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "softplus": nn.Softplus,
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "identity": nn.Identity,
}

# factors on the weights that keep the scale of a signal, from torch.nn.init.calculate_gain; all other activations
# rectify, so they take the gain of relu
RELU_GAIN = math.sqrt(2.0)
GAINS = {"sigmoid": 1.0, "tanh": 5.0 / 3.0, "selu": 0.75, "identity": 1.0}


def initialise(layer: nn.Linear, *, init: str, gain: float, std: float) -> None:
    """Initialize the weight of a linear layer and set its bias to zero; `default` keeps torch's values of both.

    Args:
        layer: Changed in place.
        init: `default`, `xavier` (Glorot and Bengio 2010, eq. 16), `kaiming` (arXiv:1502.01852, eq. 10),
            `orthogonal` (arXiv:1312.6120) or `normal`.
        gain: Factor on the weights, except with `normal`.
        std: Standard deviation of `normal`.
    """
    if init == "default":
        return
    if init == "xavier":
        nn.init.xavier_uniform_(layer.weight, gain=gain)
    elif init == "kaiming":
        nn.init.normal_(layer.weight, std=gain / math.sqrt(layer.in_features))
    elif init == "orthogonal":
        nn.init.orthogonal_(layer.weight, gain=gain)
    else:
        nn.init.normal_(layer.weight, std=std)
    nn.init.zeros_(layer.bias)


def at_least_one(**values: int) -> None:
    """Raise a GradwatchError for the first model setting below 1."""
    for key, value in values.items():
        if value < 1:
            raise GradwatchError(f"model.{key}: got {value}, expected at least 1")


def fraction(**values: float) -> None:
    """Raise a GradwatchError for the first model setting that is not from 0 to below 1."""
    for key, value in values.items():
        if not 0.0 <= value < 1.0:
            raise GradwatchError(f"model.{key}: got {value}, expected a number from 0 to below 1")
