"""Find batches whose samples are all the same, while other batches have others: the samples share one memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

import torch
from torch import Tensor

from gradwatch.events import SAMPLES_EQUAL
from gradwatch.probe.batches.batch_hash import tensors
from gradwatch.probe.batches.repeated_samples import INSPECTED_STEPS, MIN_SAMPLES
from gradwatch.probe.device.sync import can_be_read, host_tensor
from gradwatch.records import Event

MIN_BATCHES = 3
"""Minimum number of different batches: one that comes again is reported as such."""


@final
class EqualSamples:
    """Look at the samples of the first batches, until those of one batch differ.

    A loop that keeps each observation of an environment, which is always the same array, has memories that all show the
    present. Samples that a loop repeats on purpose are a view of one sample, or the same in each batch.

    Attributes:
        is_over: Whether no further batch is needed.
    """

    def __init__(self) -> None:
        self._different: list[list[Tensor]] = []
        self.is_over = False

    def inspect(self, batch: Any, *, step: int) -> Iterator[Event]:
        """Yield an event after the last inspected step if no batch had two samples that differ.

        Args:
            batch: The inputs of the step, any nest of tensors. Tensors of two dimensions or more count.
            step: Optimizer step.
        """
        if self.is_over or step not in INSPECTED_STEPS:
            return
        samples = [leaf for leaf in tensors(batch) if leaf.ndim > 1]
        are_repeated = bool(samples) and all(map(_is_repeated, samples))
        self.is_over = not are_repeated or step == INSPECTED_STEPS[-1]
        if not are_repeated:
            return
        first = [host_tensor(leaf[0]).clone() for leaf in samples]
        if not any(_are_equal(first, other) for other in self._different):
            self._different.append(first)
        if self.is_over and len(self._different) >= MIN_BATCHES:
            yield SAMPLES_EQUAL.emit(step=step, values={"samples": len(samples[0]), "batches": len(self._different)})


def _is_repeated(leaf: Tensor) -> bool:
    """Return whether all samples of a tensor are copies of one, each with its own memory."""
    is_readable = leaf.layout == torch.strided and can_be_read(leaf)
    if not is_readable or len(leaf) < MIN_SAMPLES or not leaf.numel() or leaf.stride(0) == 0:
        return False
    return bool((leaf == leaf[:1]).all())


def _are_equal(samples: list[Tensor], others: list[Tensor]) -> bool:
    return len(samples) == len(others) and all(map(torch.equal, samples, others))
