"""Build a fully connected network with settings that also allow badly conditioned ones."""

# N = samples, I = inputs, O = outputs of a layer

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, final

from torch import Tensor, nn

from gradwatch.errors import GradwatchError
from gradwatch.models._layers import ACTIVATIONS, GAINS, RELU_GAIN, at_least_one, fraction, initialise
from gradwatch.records import DataSpec

NORMALIZATIONS: dict[str, Callable[[int], nn.Module]] = {
    "none": nn.Identity,
    "batch": nn.BatchNorm1d,
    "layer": nn.LayerNorm,
}


@final
class Block(nn.Module):
    """One hidden layer: linear, normalization, activation, dropout, and optionally a residual connection.

    Args:
        inputs: Width of the input, I.
        outputs: Width of the output, O.
        activation: Key of `ACTIVATIONS`.
        normalization: Key of `NORMALIZATIONS`.
        residual: Whether to add the input to the output, if both have the same width.
        dropout: Fraction of outputs set to zero in training.
    """

    def __init__(
        self, inputs: int, outputs: int, *, activation: str, normalization: str, residual: bool, dropout: float
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.norm = NORMALIZATIONS[normalization](outputs)
        self.act = ACTIVATIONS[activation]()
        self.dropout = nn.Dropout(dropout)
        self.residual = residual and inputs == outputs  # the first block usually changes the width

    def forward(self, x_NI: Tensor) -> Tensor:
        """Return the output, shape (N, O)."""
        y_NO: Tensor = self.dropout(self.act(self.norm(self.linear(x_NI))))
        return x_NI + y_NO if self.residual else y_NO


@final
class MLP(nn.Module):
    """A chain of hidden blocks and a linear head. Inputs of any shape are flattened."""

    def __init__(self, blocks: list[Block], head: nn.Linear) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*blocks)
        self.head = head

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits or values, shape (N, O)."""
        outputs: Tensor = self.head(self.blocks(inputs.flatten(1)))
        return outputs


def build(
    spec: DataSpec,
    *,
    depth: int = 3,
    width: int = 128,
    activation: Literal[
        "relu", "leaky_relu", "elu", "selu", "gelu", "silu", "softplus", "sigmoid", "tanh", "identity"
    ] = "relu",
    normalization: Literal["none", "batch", "layer"] = "none",
    residual: bool = False,
    dropout: float = 0.0,
    init: Literal["default", "xavier", "kaiming", "orthogonal", "normal"] = "default",
    init_std: float = 0.02,
    gain: float | None = None,
) -> nn.Module:
    """Return a fully connected network for classes or values.

    Args:
        spec: Description of the data.
        depth: Linear layers, the output layer included.
        width: Units of each hidden layer.
        activation: Between the layers.
        normalization: Between each hidden layer and its activation.
        residual: Add its input to each hidden layer's output, from the second hidden layer on.
        dropout: Fraction of hidden units set to zero in training.
        init: How weights start; all but torch's default set biases to zero.
        init_std: Standard deviation of the weights where `init` is normal.
        gain: Factor on xavier, kaiming and orthogonal weights of hidden layers; null suits the activation.
    """
    if spec.kind == "tokens":
        raise GradwatchError("model: mlp takes classes or values, but the data has a label per position; use gpt")
    at_least_one(depth=depth, width=width)
    fraction(dropout=dropout)
    inputs = math.prod(spec.input_shape)
    blocks = [
        Block(
            width if i else inputs,
            width,
            activation=activation,
            normalization=normalization,
            residual=residual,
            dropout=dropout,
        )
        for i in range(depth - 1)  # the head is the last of `depth` linear layers
    ]
    head = nn.Linear(width if blocks else inputs, spec.outputs)
    for block in blocks:
        hidden_gain = GAINS.get(activation, RELU_GAIN) if gain is None else gain
        initialise(block.linear, init=init, gain=hidden_gain, std=init_std)
    initialise(head, init=init, gain=1.0, std=init_std)  # no activation follows the head
    return MLP(blocks, head)
