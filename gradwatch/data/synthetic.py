"""Generate samples: clouds of points in classes, or the values of a smooth random function."""

# N = samples, D = dims, K = outputs, H = hidden units of the random function

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from gradwatch.data import Splits
from gradwatch.data._memory import InMemory
from gradwatch.data._split import random_split
from gradwatch.errors import GradwatchError
from gradwatch.records import DataSpec

CENTER_DISTANCE = 3.0  # norm of each class center: at noise 1, neighboring clouds touch; at 0.5, they barely do
HIDDEN = 16


def build(
    *,
    kind: Literal["classes", "values"] = "classes",
    samples: int = 2000,
    dims: int = 20,
    outputs: int | None = None,
    noise: float = 0.5,
    seed: int = 0,
    val_fraction: float = 0.2,
) -> Splits:
    """Return synthetic samples, which depend on the arguments alone.

    Args:
        kind: `classes`: points around one center per class. `values`: a random function of the inputs.
        samples: Number of samples in both parts together.
        dims: Number of values of one input.
        outputs: Number of classes, or width of the target; null is 4 classes, or width 1.
        noise: Standard deviation of the noise of the points of classes, or of the values.
        seed: Seed of the samples and of the validation part.
        val_fraction: Fraction of the samples that is held out for validation.
    """
    width = outputs if outputs is not None else {"classes": 4, "values": 1}[kind]
    for key, value in (("samples", samples), ("dims", dims), ("outputs", width)):
        if value < 1:
            raise GradwatchError(f"data.{key}: got {value}, expected at least 1")
    generator = torch.Generator().manual_seed(seed)
    make = _classes if kind == "classes" else _values
    inputs, targets = make(samples, dims, width, noise, generator)
    train, val = (
        InMemory(inputs[part], targets[part])
        for part in map(torch.from_numpy, random_split(samples, val_fraction=val_fraction, seed=seed))
    )
    return Splits(train, val if len(val) else None, DataSpec(input_shape=(dims,), outputs=width, kind=kind))


def _classes(samples: int, dims: int, outputs: int, noise: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return inputs (N, D) and labels (N,), with the same number of samples in each class."""
    centers_KD = torch.randn(outputs, dims, generator=generator)
    centers_KD *= CENTER_DISTANCE / centers_KD.norm(dim=1, keepdim=True)
    labels = torch.arange(samples) % outputs
    return centers_KD[labels] + noise * torch.randn(samples, dims, generator=generator), labels


def _values(samples: int, dims: int, outputs: int, noise: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return inputs (N, D) and values (N, K) of a random function with one hidden layer and deviation about 1."""
    # divided by the square root of the fan-in, so that the scale does not depend on dims or HIDDEN
    inputs = torch.randn(samples, dims, generator=generator)
    into_DH = torch.randn(dims, HIDDEN, generator=generator) * 2 / dims**0.5
    out_of_HK = torch.randn(HIDDEN, outputs, generator=generator) / HIDDEN**0.5
    values = torch.tanh(inputs @ into_DH) @ out_of_HK
    return inputs, values + noise * torch.randn(samples, outputs, generator=generator)
