"""Run the passes of all ranks in one process, one rank after the other, to repeat a step of several ranks."""

# R = ranks, B = samples of the global batch, K = micro-batches

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
from torch import Tensor
from torch.utils._pytree import tree_map_only

from gradwatch.probe.batches.batch_hash import hash_batch
from gradwatch.state.rng import random_state, set_random_state
from gradwatch.train.parallel.parts import Indices, Part, StandIn
from gradwatch.train.step import Batch, Passes, Stepper
from gradwatch.train.training_state import TrainingState


@final
class RanksInTurn:
    """The ranks of a training, which share the model of this process.

    Each rank has its part of the global batch and its own random numbers. As with DistributedDataParallel, each begins
    a step with the buffers of rank 0, whose buffers are kept. The gradients are averaged in a different order than by
    the ranks, so that sums over more than two ranks may be rounded differently.

    Args:
        training: The training in this process.
        random_R: State of the random generators of each rank before the next step.

    Attributes:
        random_R: State of the random generators of each rank after the last step.
        hashes: Hashes of the inputs of each rank, as its monitor records them, by step; None without a sample.
    """

    def __init__(self, training: TrainingState, random_R: Sequence[Mapping[str, Any]]) -> None:
        self.random_R = list(random_R)
        self.hashes: dict[int, list[int | None]] = {}
        self._training = training

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.random_R)

    def part(self, rank: int) -> Part:
        """Return the part of each global batch that a rank reads."""
        return Part(rank=rank, world_size=self.world_size)

    def window_of(self, rank: int, window: Sequence[Batch]) -> list[Batch]:
        """Return the micro-batches of a rank from global ones."""
        return [part_of_batch(self.part(rank), batch) for batch in window]

    def weights(self, stepper: Stepper, window_RK: Sequence[Sequence[Batch]]) -> list[list[float]]:
        """Return the factors of the losses of each rank, by rank and micro-batch."""
        counts_RK = [stepper.counts(window_K) for window_K in window_RK]
        return [stepper.weights(counts_K, counts_RK, self.world_size) for counts_K in counts_RK]

    def passes(self, stepper: Stepper, window: Sequence[Batch]) -> Passes:
        """Add up the gradients of a window of global batches, as `Stepper.backward` does."""
        window_RK = [self.window_of(rank, window) for rank in range(self.world_size)]
        weights_RK = self.weights(stepper, window_RK)
        self.hashes[self._training.progress.step] = [_hash(window_K) for window_K in window_RK]
        params = [p for group in stepper.optimizer.param_groups for p in group["params"]]
        buffers = list(self._training.model.buffers())
        before = [buffer.clone() for buffer in buffers]
        sums: list[Tensor | None] = [None] * len(params)
        rows: list[list[float]] = []
        for rank in reversed(range(self.world_size)):  # rank 0 last: its buffers and its random numbers are kept
            set_random_state(self.random_R[rank])
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)
            rows.append(stepper.pass_of_rank(window_RK[rank], weights_RK[rank], self.world_size))
            self.random_R[rank] = random_state()
            for i, p in enumerate(params):
                if p.grad is not None:
                    mean, total = p.grad.div_(self.world_size), sums[i]
                    sums[i], p.grad = mean if total is None else total.add_(mean), None
        for p, total in zip(params, sums, strict=True):
            p.grad = total
        return Passes.joined(rows[::-1])


def part_of_batch(part: Part, batch: Batch) -> Batch:
    """Return the samples of a rank from a global batch, as tensors of their own, or a `StandIn`."""
    num_samples = len(batch[1])
    own_B: Indices = part.of(np.arange(num_samples))
    # with its own memory, like a batch that is read: some kernels depend on the alignment
    own = tree_map_only(Tensor, lambda tensor: tensor[int(own_B[0]) : int(own_B[-1]) + 1].clone(), tuple(batch))
    return StandIn(own) if part.is_empty(num_samples) else own


def _hash(window_K: Sequence[Batch]) -> int | None:
    if isinstance(window_K[0], StandIn):
        return None
    return hash_batch(window_K[0][0] if len(window_K) == 1 else [inputs for inputs, _ in window_K])
