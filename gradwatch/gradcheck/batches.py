"""Check a part of the batch: another size, and whether the gradient adds up over parts as the loss does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from gradwatch.gradcheck.stepping.step import CheckedStep
from gradwatch.gradcheck.stepping.tensors import norm

EQUAL_LOSS_ERROR = 1e-9
"""Relative difference at which two losses are equal."""
MIN_SAMPLES = 4


@final
@dataclass(frozen=True, slots=True)
class Parts:
    """The two halves of a batch.

    Args:
        step: The step on the first half.
        other: The step on the second half.
        sizes: Samples of the whole and of the first half.
    """

    step: CheckedStep
    other: CheckedStep
    sizes: list[int]


def smaller(step: CheckedStep) -> Parts | None:
    """Return the halves of a batch, or None if its size is fixed or too small."""
    tensors = [t for t in tree_leaves(step.batch) if isinstance(t, Tensor)]
    sizes = {t.shape[0] if t.ndim else 0 for t in tensors}
    if len(sizes) != 1 or min(sizes) < MIN_SAMPLES:
        return None
    (size,) = sizes
    half = size // 2

    def part(low: int, high: int) -> Any:
        return tree_map_only(Tensor, lambda t: t.detach()[low:high].clone().requires_grad_(t.requires_grad), step.batch)

    first, second = step.with_batch(part(0, half)), step.with_batch(part(half, size))
    try:
        first.loss()
        second.loss()
    except (RuntimeError, ValueError, IndexError, TypeError):  # the loss holds targets of the whole batch
        return None
    return Parts(first, second, [size, half])


def batch_law(step: CheckedStep, parts: Parts) -> str:
    """Return whether the gradient of the batch is the mean or the sum over its halves, or an empty string."""
    step.move(step.home)
    whole, first, second = step.gradients(), parts.step.gradients(), parts.other.gradients()
    n, half = parts.sizes
    laws = {"mean": (half / n, 1 - half / n), "sum": (1.0, 1.0)}
    for law, (a, b) in laws.items():
        if abs(whole.loss - a * first.loss - b * second.loss) <= EQUAL_LOSS_ERROR * max(abs(whole.loss), 1e-300):
            names = [name for name in whole.by_name if not name.startswith("input")]
            gap = max(
                (
                    norm(whole.by_name[m] - a * first.by_name[m] - b * second.by_name[m])
                    / max(norm(whole.by_name[m]), torch.finfo(torch.float64).tiny)
                    for m in names
                ),
                default=0.0,
            )
            holds = "so is the gradient" if gap < 1e-6 else f"the gradient differs from that by {gap:.1e}"
            return f"the loss is the {law} over its halves, and {holds}"
    why = "samples affect each other, or a half draws other random numbers"
    return f"the loss is neither the mean nor the sum over its halves: {why}"
