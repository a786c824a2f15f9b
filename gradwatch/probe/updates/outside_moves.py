"""Find weights that no watched optimizer moves, but another optimizer, a copy or the loop."""

# P = parameters that are compared

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import final

import torch
from torch import Tensor

from gradwatch.events import WEIGHTS_MOVED, Observation
from gradwatch.probe.device.dtensor import has_values, local_part
from gradwatch.probe.device.sync import to_host
from gradwatch.probe.device.torch_reduce import stored_values, wide_dtype
from gradwatch.records import LayerInfo

EARLY_STEPS = (1, 8)
"""Steps of the comparisons after the first one. By then, a weight that moves at every eighth update has moved."""

EVERY_STEPS = 10
"""Minimum steps between two later comparisons."""


@final
class OutsideMoves:
    """Compare the sum and the norm of each weight that no watched optimizer holds between some steps.

    The first read covers all weights, since a frozen one may thaw; later reads cover the trainable ones. A weight that
    has moved is reported once and not read again. Each process compares its own part of a distributed weight.

    Args:
        params: The parameters, in the order of `layers`.
        layers: The parameters' descriptions.
    """

    def __init__(self, params: Sequence[Tensor], layers: Sequence[LayerInfo]) -> None:
        self._layers = layers
        self._params = {i: param for i, param in enumerate(params) if layers[i].group is None and not param.is_meta}
        self._before: dict[int, bytes] = {}
        self._next = 0

    def find(self, step: int, /) -> Iterator[Observation]:
        """Yield each run of consecutive weights that have moved since they were first read.

        Args:
            step: Finished optimizer step.
        """
        if step < self._next or not self._params:
            return
        self._next = next((s for s in EARLY_STEPS if s > step), step - step % EVERY_STEPS + EVERY_STEPS)
        due = {i: p for i, p in self._params.items() if (p.requires_grad or i not in self._before) and has_values(p)}
        now = dict(zip(due, fingerprints(list(due.values())), strict=True))
        moved = [i for i, mark in now.items() if self._before.setdefault(i, mark) != mark]
        for i in moved:
            del self._params[i]
        for first, last in runs(moved):
            names = [self._layers[i].name for i in (first, last)]
            values = {"first": first, "last": last}
            yield WEIGHTS_MOVED.observe(names[0], values=values, weights=" to ".join(dict.fromkeys(names)))


def fingerprints(params: Sequence[Tensor]) -> list[bytes]:
    """Return sum and norm of each tensor: a change of any value almost always changes one of the two."""
    if not params:
        return []  # `torch.stack` rejects an empty list
    marks = [_sum_and_norm(param) for param in params]
    marks_P2 = to_host(torch.stack([mark.to(marks[0]) for mark in marks]))  # the devices are waited for together
    return [mark_2.tobytes() for mark_2 in marks_P2]  # bytes, in which NaN equals itself


def _sum_and_norm(param: Tensor) -> Tensor:
    wide, values = wide_dtype(param.device), stored_values(local_part(param).detach())
    values = values if values.dtype in (torch.float32, torch.float64) else values.float()
    return torch.stack([values.sum(dtype=wide), torch.linalg.vector_norm(values, dtype=wide)])


def runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the first and the last of each run of consecutive numbers."""
    # a number minus its position is constant within a run
    for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        yield members[0], members[-1]
