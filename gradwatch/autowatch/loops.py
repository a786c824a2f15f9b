"""Keep the watched loops of a script: find, close and discard them."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator
from typing import final

from torch import Tensor
from torch.optim import Optimizer

from gradwatch.autowatch.hand_loop import HandLoop
from gradwatch.autowatch.optimizer_loop import OptimizerLoop

MIN_BACKWARD = 3
"""Backward passes without an update from which the update is missing: a script may look at gradients once."""


@final
class Loops:
    """The loops that are being watched.

    Attributes:
        num_begun: Number of loops so far, with those that have ended.
    """

    def __init__(self) -> None:
        self.num_begun = 0
        self._all: list[OptimizerLoop | HandLoop] = []

    def __iter__(self) -> Iterator[OptimizerLoop | HandLoop]:
        return iter([*self._all])

    def __len__(self) -> int:
        return len(self._all)

    def add(self, loop: OptimizerLoop | HandLoop) -> None:
        """Add a loop."""
        self.num_begun += 1
        self._all.append(loop)

    def of(self, optimizer: Optimizer) -> OptimizerLoop | None:
        """Return the loop of an optimizer, or None."""
        return next((loop for loop in self._all if isinstance(loop, OptimizerLoop) and optimizer in loop), None)

    def adopt(self, optimizer: Optimizer) -> bool:
        """Give an optimizer to the loop that it continues, and return whether there is one."""
        return any(isinstance(loop, OptimizerLoop) and loop.adopt(optimizer) for loop in self._all)

    def reached_by(self, loss: Tensor) -> list[OptimizerLoop | HandLoop]:
        """Return the loops whose parameters a loss depends on."""
        if len(self._all) < 2:
            return [*self._all]
        leaves = leaves_of(loss)
        return [loop for loop in self._all if any(id(leaf) in loop.params for leaf in leaves)]

    def after_scaler_update(self) -> None:
        """Record the steps that have waited for the loss scale."""
        for loop in self._all:
            if isinstance(loop, OptimizerLoop):
                loop.after_scaler_update()

    def before_clearing(self) -> None:
        """Record the steps of loops that move their weights by hand."""
        for loop in self._all:
            if isinstance(loop, HandLoop):
                loop.record_if_moved()

    def close_before(self, clock: int) -> None:
        """Close the loops without an update since a time, such as the loop of the last fold."""
        for loop in self:
            if loop.updated_at < clock:
                self.close(loop)

    def close_by_hand(self, params: Collection[int]) -> None:
        """Close the loops that seemed to move some parameters by hand.

        Args:
            params: The `id` of each parameter that an optimizer is about to move.
        """
        for loop in self:
            if isinstance(loop, HandLoop) and not loop.params.isdisjoint(params):
                self.close(loop)

    def close(self, loop: OptimizerLoop | HandLoop) -> None:
        """Close a loop. If it has recorded nothing, its run is deleted."""
        self._all.remove(loop)
        loop.detach()
        monitor = loop.recorder.monitor
        if monitor is None:
            return
        if loop.recorder.num_steps:
            monitor.close()
            return
        monitor.detach()
        monitor.pipeline.discard()
        monitor.abandon()  # closing its monitor would print a summary
        if monitor.run_dir is not None:
            shutil.rmtree(monitor.run_dir, ignore_errors=True)

    def without_steps(self) -> list[int]:
        """Return the number of backward passes of each loop whose optimizers were never called."""
        made = [loop for loop in self._all if isinstance(loop, OptimizerLoop) and loop.never_stepped()]
        return [loop.num_backward for loop in made if loop.num_backward >= MIN_BACKWARD]

    def discard_empty(self) -> int:
        """Record the steps that are due, close the loops that have recorded nothing, and return their number."""
        for loop in self:
            loop.detach()
        empty = [loop for loop in self if not loop.recorder.num_steps]
        for loop in empty:
            self.close(loop)
        return len(empty)

    def forget(self) -> None:
        """Leave all loops to the parent process, in a forked child."""
        self._all = []


def leaves_of(loss: Tensor) -> list[Tensor]:
    """Return the parameters that a loss depends on."""
    # imported here, since it is needed for unusual scripts only
    from gradwatch.probe.graph.graph import LEAF, Graph

    return [] if loss.grad_fn is None else [node.variable for node in Graph(loss).of(LEAF)]
