"""Hold samples in memory as two tensors, and read them a batch at a time."""

# N = samples, B = samples of a batch

from __future__ import annotations

from typing import final

import torch
from torch import Tensor
from torch.utils.data import Dataset

BYTE_SCALE = 1.0 / 255.0


@final
class InMemory(Dataset[tuple[Tensor, Tensor]]):
    """Inputs and targets in two tensors.

    Args:
        inputs: Shape (N, ...). uint8 inputs are stored as uint8 and read as float32 from 0 to 1.
        targets: Shape (N, ...).
    """

    is_random = False

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        assert len(inputs) == len(targets), "one target per sample"
        self.inputs = inputs
        self.targets = targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return _scaled(self.inputs[index]), self.targets[index]

    def batch(self, indices_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of the samples, stacked."""
        # index_select: 3x as fast as inputs[indices_B] for small batches
        return _scaled(self.inputs.index_select(0, indices_B)), self.targets.index_select(0, indices_B)


def _scaled(inputs: Tensor) -> Tensor:
    # bit-identical to torchvision's ToDtype(float32, scale=True)
    return inputs.to(torch.float32).mul_(BYTE_SCALE) if inputs.dtype == torch.uint8 else inputs
