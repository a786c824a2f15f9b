"""Find the first bad operation of a recorded step, and the step since which its weights are bad."""

# B = samples of a batch

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import numpy as np
from torch import Tensor

from gradwatch.errors import RunError
from gradwatch.history.disk.writer import read
from gradwatch.history.store import History
from gradwatch.replay.locate.bad_operation import Located
from gradwatch.replay.locate.locate import locate
from gradwatch.replay.restore.restored_step import RestoredStep, restore_step
from gradwatch.train.step import Stepper, to_device

GROWN = 1e3
"""Ratio of a weight's norm to its first recorded norm above which the weight counts as too large."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """The result of searching a step.

    Args:
        step: Optimizer step.
        located: First bad operation of the step, or None if there is none.
        since: Step with the update that made the weight bad; None for other causes, or if the history does not show it.
        rank: Rank of the operation; None with one process, or if no rank has a bad operation.
    """

    step: int
    located: Located | None
    since: int | None
    rank: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        of_rank = {} if self.rank is None else {"rank": self.rank}
        found = self.located.to_json() if self.located else {}
        return {"step": self.step, **of_rank, "bad_since": self.since, **found}


def locate_in_run(run: Path, step: int, *, rank: int | None = None) -> Search:
    """Search a step of a run for its first bad operation.

    Args:
        run: The run directory.
        step: Optimizer step.
        rank: Rank to search, if several ranks made the step. By default, the ranks are searched in order.

    Raises:
        GradwatchError: The step cannot be restored, or there is no such rank.
    """
    with restore_step(run, step, of_ranks=True) as restored:
        number, located = _locate_on_ranks(restored, rank)
    weight = located.weight if located else None
    since = bad_since(read(run), weight.name) if weight else None
    return Search(step=step, located=located, since=since, rank=number)


def _locate_on_ranks(restored: RestoredStep, rank: int | None) -> tuple[int | None, Located | None]:
    """Return the first bad operation of a restored step, and its rank if there are several."""
    size = restored.world_size
    if rank is not None and rank >= size:
        raise RunError(f"--rank: got {rank}, expected a number below {size}, the number of ranks of this step")
    if size == 1:
        return None, locate_step(restored)
    for number in range(size) if rank is None else (rank,):
        restored.turn_to(number)
        if located := locate_step(restored):
            return number, located
    return None, None


def locate_step(restored: RestoredStep) -> Located | None:
    """Return the first bad operation of a restored step, or None if there is none; the state is restored."""
    stepper = restored.stepper()
    restored.restore()
    try:
        for share, batch, indices_B in zip(restored.shares, restored.window, restored.indices, strict=True):
            step = _forward_backward(stepper, share)
            # a share of 0: no target of the micro-batch counts, so its loss has no part in the step
            if share and (located := locate(step, *batch, model=stepper.model)):
                return replace(located, in_data=tuple(int(indices_B[i]) for i in located.samples))
            step(*batch)  # the next micro-batch needs the random state and BatchNorm statistics after this one
    finally:
        restored.restore()
    return None


def bad_since(history: History, name: str) -> int | None:
    """Return the step with the update that made a weight bad, or None if the history does not show it.

    Args:
        history: History of the run.
        name: Name of the parameter.
    """
    layers = [layer.name for layer in history.info.layers]
    if name not in layers:  # for example a buffer, which the history does not record
        return None
    column = layers.index(name)
    steps_T, skipped_T = history.steps("grad.nonfinite"), history["skipped"]
    # a skipped update does not carry a non-finite gradient into the weight
    harmed_T = (history["grad.nonfinite"][:, column] > 0) & (skipped_T != 1)
    if harmed_T.any():
        return int(steps_T[np.argmax(harmed_T)])  # argmax of booleans is the first True
    norm_T = history["weight.l2"][:, column]
    steps_T = history.steps("weight.l2")
    known_T = np.isfinite(norm_T)
    if not known_T.any():
        return None
    grown_T = known_T & (norm_T > GROWN * max(norm_T[known_T][0], 1e-30))
    return int(steps_T[np.argmax(grown_T)]) if grown_T.any() else None


def _forward_backward(stepper: Stepper, share: float) -> Callable[..., Tensor]:
    """Return a function that runs the forward and backward pass of one micro-batch as the stepper does."""

    def step(inputs: Any, targets: Tensor) -> Tensor:
        _, loss = stepper.forward(*to_device((inputs, targets), stepper.device))
        # no multiplication by 1: the traced operations must be those of the training
        part = loss * share if share != 1.0 else loss
        (stepper.scaler.scale(part) if stepper.scaler else part).backward()
        return loss

    return step
