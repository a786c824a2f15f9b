"""Keep the hashes of some samples that a rank trains on, to find samples that it shares with other ranks."""

# N = samples, V = values that are read of a sample

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwatch.pipeline.ranks.samples import KeptSamples
from gradwatch.probe.batches.batch_hash import GOLDEN_64, MASK_64, tensors
from gradwatch.probe.device.dtensor import is_distributed
from gradwatch.probe.device.sync import on_device, to_host
from gradwatch.probe.graph.graph import signed

MAX_CALLS = 512
"""Forward passes that are read, from the first one on: 40 us each for samples of 10 values."""
MAX_VALUES = 64
"""About the maximum number of values that are read of each tensor of a sample, spread evenly over the sample."""

_SHOWN = (1 << 48) - 1
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@final
class SampleReader:
    """Reads some values of all samples of a rank, until the rank sees a sample again.

    That is in its second epoch at the latest. From then on, samples change their rank in healthy trainings as well.
    """

    def __init__(self) -> None:
        self._read: list[tuple[int, list[Tensor]]] = []
        self._kept = KeptSamples()
        self._num_calls = 0
        self._is_over = False

    def read(self, inputs: Any, *, step: int) -> None:
        """Keep values of the samples of a forward pass, without waiting for their device."""
        if self._num_calls < MAX_CALLS and not self._is_over:
            self._num_calls += 1
            if values := sample_values(tensors(inputs)):
                self._read.append((step, values))

    def values(self, step: int) -> dict[str, float]:
        """Return the hashes and their steps as values of an event; empty once a sample has come twice."""
        if self._is_over or not self._read:
            return {}
        hashes = np.concatenate([*self._new_hashes()])
        steps = np.concatenate([np.full(len(parts[0]), read_at) for read_at, parts in self._read])
        self._read = []
        self._is_over = self._kept.add(hashes, steps) or self._num_calls == MAX_CALLS
        return self._kept.values(step)

    def _new_hashes(self) -> Iterator[NDArray[np.int64]]:
        # many steps at once: on a small batch, an operation costs more than its work
        for _, group in itertools.groupby((parts for _, parts in self._read), key=_forms):
            yield to_host(hash_samples([torch.cat(parts) for parts in zip(*group, strict=True)]))


def _forms(parts: Sequence[Tensor]) -> list[tuple[object, ...]]:
    return [(part.shape[1:], part.dtype, part.device) for part in parts]


def sample_values(batch: Iterable[Tensor]) -> list[Tensor]:
    """Return copies of some values of each sample of a batch, evenly spread, from each tensor with a row per sample."""
    plain = [t for t in batch if t.layout == torch.strided and t.ndim and not (t.is_quantized or is_distributed(t))]
    rows = [t for t in plain if len(t) == len(plain[0]) and t.device == plain[0].device]
    return [t.detach()[_spread(t.shape)].clone() for t in rows]


def hash_samples(values: Sequence[Tensor]) -> Tensor:
    """Return a hash of each sample: numbers below 2^48, of shape (N,), int64, on the device of the values.

    Args:
        values: The result of `sample_values`.
    """
    total_N = torch.zeros(len(values[0]), dtype=torch.int64, device=values[0].device)
    for part in values:
        real = torch.view_as_real(part) if part.is_complex() else part
        bits_NV = real.reshape(len(real), -1).view(_INTEGERS[real.element_size()]).long()
        weights_V = on_device(_weights(bits_NV.shape[1]), bits_NV.device)
        total_N = total_N * signed(GOLDEN_64) + (bits_NV * weights_V).sum(1)
    # mixed, so that the smallest hashes are a fair choice of the samples
    total_N = (total_N ^ total_N >> 32) * signed(GOLDEN_64)
    return (total_N ^ total_N >> 29) & _SHOWN


@functools.lru_cache(maxsize=32)
def _spread(shape: torch.Size) -> tuple[slice, ...]:
    """Return the index of evenly spread values of all samples: short dimensions leave their share to longer ones."""
    index = [slice(None)] * len(shape)
    left = float(MAX_VALUES)
    dims = sorted(range(1, len(shape)), key=lambda d: shape[d])
    for i, d in enumerate(dims):
        number = min(shape[d], max(1, int(left ** (1 / (len(dims) - i)))))
        index[d] = slice(None, None, shape[d] // number if number else None)
        left /= max(number, 1)
    return tuple(index)


@functools.lru_cache(maxsize=8)
def _weights(num_values: int) -> tuple[int, ...]:
    """Return an odd factor for each value, so that samples with equal values in another order differ."""
    state, factors = 0, []
    for _ in range(num_values):  # splitmix64, https://doi.org/10.1145/2714064.2660195
        state = state + GOLDEN_64 & MASK_64
        mixed = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & MASK_64
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & MASK_64
        factors.append(signed((mixed ^ mixed >> 31) | 1))
    return tuple(factors)
