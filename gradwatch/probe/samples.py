"""Tell whether the samples of a run's first batches are the same ones again, moved about or with noise added."""

from __future__ import annotations

import math
from typing import Any, final

import torch
from torch import Tensor

from gradwatch.probe.batch_hash import tensors
from gradwatch.probe.transfer import to_float
from gradwatch.records import Event

LOOKS = (0, 1, 8, 10, 20, 30)
"""Steps that are looked at, as long as all are alike: unshuffled epochs of any length but one differ at the second."""

FEWEST, MOST = 4, 256
"""Samples of a batch that is looked at: more of them may well be all the data."""

FEATURES = 1024
"""Numbers of a sample that are looked at, spread over all of it."""

NEAR = 0.3
"""Distance from a sample to the nearest one of the first batch, in units of that one's distance to its own neighbour,
as median over the samples: 1 for samples of the same kind, 0 for the same ones, and in between for noise."""


@final
class Samples:
    """Keeps the first batch of a run, as long as those that follow are made of the same samples.

    Attributes:
        is_over: Whether no further batch is of interest.
    """

    def __init__(self) -> None:
        self._first: tuple[Tensor, Tensor] | None = None  # its rows, and how far each is from the nearest other one
        self.is_over = False

    def look(self, batch: Any, *, step: int) -> Event | None:
        """Return that all batches looked at were alike, once that is so.

        Args:
            batch: The step's inputs, any nest of tensors, of which the first with samples counts, if it is on a CPU.
            step: Optimizer step, counted from the beginning of the run.
        """
        if self.is_over or step not in LOOKS:
            return None
        rows = _rows(batch)
        if rows is None:
            self.is_over = True
        elif step == LOOKS[0]:
            self._first = rows, _between(rows)
        else:
            distance = self._distance(rows)
            self.is_over = not distance <= NEAR or step == LOOKS[-1]
            if distance <= NEAR and self.is_over:
                values = {"distance": distance, "samples": float(len(rows)), "features": float(rows.shape[1])}
                text = "the batches looked at are made of the same samples"
                return Event(kind="batch-alike", step=step, text=text, values=values)
        return None

    def _distance(self, rows: Tensor) -> float:
        """Return how far samples are from the nearest of the first batch; nan where two of that are the same."""
        if self._first is None or rows.shape != self._first[0].shape:
            return math.inf
        first, between = self._first
        near, place = torch.cdist(rows, first).min(1)
        is_apart = to_float(between.min()) > 0
        return to_float((near / between[place]).median()) if is_apart else math.nan


def _rows(batch: Any) -> Tensor | None:
    """Return the samples of a batch as rows of numbers."""
    found = next((leaf for leaf in tensors(batch) if leaf.ndim > 1 and FEWEST <= len(leaf) <= MOST), None)
    if found is None or found.device.type != "cpu" or found.layout != torch.strided or found.is_complex():
        return None
    rows = found.detach().flatten(1)
    return rows[:, :: max(1, rows.shape[1] // FEATURES)].float().clone()


def _between(rows: Tensor) -> Tensor:
    """Return the distance of each sample to the nearest other one."""
    return torch.cdist(rows, rows).fill_diagonal_(float("inf")).amin(1)
