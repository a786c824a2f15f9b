"""Find the samples of a batch that make a step fail: non-finite rows, or else by bisection of the batch."""

# B = samples of the batch

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from gradwatch.probe.device.sync import to_host

MAX_RUNS = 48
"""Maximum number of runs of the step for a bisection: one bad sample among 64 takes about 13."""
Indices = Sequence[int]


def count(batch: Sequence[Any]) -> int | None:
    """Return the number of samples, B, or None if the tensors differ in their first dimension."""
    # a tensor without dimensions adds None: such a batch cannot be split into samples
    sizes = {len(t) if t.ndim else None for t in tree_leaves(batch) if isinstance(t, Tensor)}
    return sizes.pop() if len(sizes) == 1 else None


def take(batch: Sequence[Any], rows: Indices) -> tuple[Any, ...]:
    """Return a batch of the samples at `rows`, in this order."""

    def rows_of(value: Any) -> Any:
        return value[torch.as_tensor(list(rows), device=value.device)] if isinstance(value, Tensor) else value

    return tuple(tree_map(rows_of, list(batch)))


def not_finite(batch: Sequence[Any]) -> tuple[int, ...]:
    """Return the samples with a value that is not finite."""
    bad_B: set[int] = set()
    for tensor in _floating(batch):
        rows = torch.nonzero(~torch.isfinite(tensor).flatten(1).all(1) if tensor.ndim > 1 else ~torch.isfinite(tensor))
        bad_B |= {int(i) for i in to_host(rows.flatten())}
    return tuple(sorted(bad_B))


def magnitudes(batch: Sequence[Any]) -> NDArray[np.float64]:
    """Return the largest magnitude of each sample, shape (B,), with NaN counted as 0."""
    largest_B: NDArray[np.float64] | None = None
    for tensor in _floating(batch):
        flat = torch.nan_to_num(tensor.detach().double().flatten(1) if tensor.ndim > 1 else tensor.double()[:, None])
        # amax raises on an empty dimension
        mine_B = np.asarray(to_host(flat.abs().amax(1)), np.float64) if flat.shape[1] else np.zeros(len(flat))
        largest_B = mine_B if largest_B is None else np.maximum(largest_B, mine_B)
    return np.zeros(0) if largest_B is None else largest_B


@final
class BatchBisection:
    """Finds the samples that each make a step fail alone.

    Args:
        fails: Returns whether the step fails on the given samples.
    """

    def __init__(self, fails: Callable[[Indices], bool]) -> None:
        self._fails = fails
        self.runs = 0

    def find(self, size: int) -> tuple[int, ...]:
        """Return the samples; empty if the failure needs several samples together, or if the runs are used up."""
        try:
            return tuple(self._search(range(size)))
        except (_TogetherError, RuntimeError, ValueError, IndexError):
            return ()  # for example BatchNorm on a single sample, or a loss that needs a full batch

    def _search(self, rows: Indices) -> list[int]:
        """Return the bad samples among samples that fail together."""
        if len(rows) == 1:
            return list(rows)
        # both halves are searched, since both may contain a bad sample
        middle = len(rows) // 2
        found = [i for half in (rows[:middle], rows[middle:]) if self._ask(half) for i in self._search(half)]
        if not found:  # neither half fails without the other
            raise _TogetherError
        return found

    def _ask(self, rows: Indices) -> bool:
        if self.runs == MAX_RUNS:
            raise _TogetherError
        self.runs += 1
        return self._fails(rows)


class _TogetherError(Exception):
    """No sample fails alone, or the bisection needs too many runs."""


def _floating(batch: Sequence[Any]) -> list[Tensor]:
    return [t for t in tree_leaves(batch) if isinstance(t, Tensor) and t.is_floating_point() and t.ndim]
