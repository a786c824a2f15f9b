"""Build a small convolutional network for images."""

# N = samples, C = channels, H, W = height and width, O = outputs

from __future__ import annotations

from typing import Literal, final

from torch import Tensor, nn

from gradwatch.errors import GradwatchError
from gradwatch.models._layers import ACTIVATIONS, at_least_one, fraction
from gradwatch.records import DataSpec

POOLS = {"max": nn.MaxPool2d, "avg": nn.AvgPool2d}


@final
class Block(nn.Module):
    """One convolution of the same height and width, normalization, activation, and pooling to half the size.

    Args:
        inputs: Channels of the input.
        outputs: Channels of the output.
        kernel: Height and width of the filters; odd.
        normalized: Whether BatchNorm follows the convolution.
        activation: Key of `ACTIVATIONS`.
        pool: Key of `POOLS`, or None.
    """

    def __init__(
        self, inputs: int, outputs: int, *, kernel: int, normalized: bool, activation: str, pool: str | None
    ) -> None:
        super().__init__()
        # no bias before a BatchNorm, which subtracts it again
        self.conv = nn.Conv2d(inputs, outputs, kernel, padding="same", bias=not normalized)
        self.norm = nn.BatchNorm2d(outputs) if normalized else nn.Identity()
        self.act = ACTIVATIONS[activation]()
        self.pool = POOLS[pool](2) if pool else nn.Identity()

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Return the output, shape (N, outputs, H, W), or (N, outputs, H / 2, W / 2) with pooling."""
        y_NCHW: Tensor = self.pool(self.act(self.norm(self.conv(x_NCHW))))
        return y_NCHW


@final
class CNN(nn.Module):
    """A chain of convolutional blocks, and a linear head on the flattened rest of the image."""

    def __init__(self, blocks: list[Block], head: nn.Linear, *, dropout: float) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*blocks)
        self.dropout = nn.Dropout(dropout)
        self.head = head

    def forward(self, images_NCHW: Tensor) -> Tensor:
        """Return logits or values, shape (N, O)."""
        outputs_NO: Tensor = self.head(self.dropout(self.blocks(images_NCHW).flatten(1)))
        return outputs_NO


def build(
    spec: DataSpec,
    *,
    channels: tuple[int, ...] = (32, 64),
    kernel: int = 3,
    normalization: Literal["none", "batch"] = "batch",
    activation: Literal[
        "relu", "leaky_relu", "elu", "selu", "gelu", "silu", "softplus", "sigmoid", "tanh", "identity"
    ] = "relu",
    pooling: Literal["none", "max", "avg"] = "max",
    dropout: float = 0.0,
) -> nn.Module:
    """Return a small convolutional network for images of shape (channels, height, width).

    Args:
        spec: Description of the data.
        channels: Filters of each block.
        kernel: Height and width of the filters; odd.
        normalization: Between each convolution and its activation.
        activation: After each convolution.
        pooling: How each block halves height and width, as long as both are at least 2.
        dropout: Fraction of the head's inputs set to zero in training.
    """
    if len(spec.input_shape) != 3 or spec.kind == "tokens":
        raise GradwatchError(
            f"model: cnn takes images of shape (channels, height, width), but a sample has shape {spec.input_shape}; "
            f"use {'gpt' if spec.kind == 'tokens' else 'mlp'}, or give the data that shape"
        )
    at_least_one(kernel=kernel, **{f"channels[{i}]": n for i, n in enumerate(channels)})
    fraction(dropout=dropout)
    if not channels or kernel % 2 == 0:
        raise GradwatchError(
            f"model.channels, model.kernel: got {channels} and {kernel}, expected one or more numbers and an odd one"
        )
    depth, height, width = spec.input_shape
    blocks = []
    # the size of the image is tracked for the head, and so that pooling ends before a side becomes 0
    for outputs in channels:
        pool = pooling if pooling != "none" and min(height, width) >= 2 else None
        normalized = normalization == "batch"
        blocks.append(Block(depth, outputs, kernel=kernel, normalized=normalized, activation=activation, pool=pool))
        depth, height, width = outputs, *((height // 2, width // 2) if pool else (height, width))
    return CNN(blocks, nn.Linear(depth * height * width, spec.outputs), dropout=dropout)
