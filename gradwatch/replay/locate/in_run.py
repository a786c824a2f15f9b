"""Name the first bad operation of a recorded step, and since when its weights are bad."""

# B = samples of a batch

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import numpy as np
from torch import Tensor

from gradwatch.history.disk.writer import read
from gradwatch.history.store import History
from gradwatch.replay.locate.bad_operation import Located
from gradwatch.replay.locate.locate import locate
from gradwatch.replay.restore.restored_step import RestoredStep, restore_step
from gradwatch.train.step import Stepper, to_device

GROWN = 1e3
"""Factor over its first norm beyond which a weight counts as out of hand in the history."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """A step that was searched.

    Args:
        step: Optimizer step.
        located: Its first bad operation, or None where there is none.
        since: Step whose update made the weight bad, if the weights are to blame and the history shows it; else None.
    """

    step: int
    located: Located | None
    since: int | None

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {"step": self.step, "bad_since": self.since, **(self.located.to_json() if self.located else {})}


def locate_in_run(run: Path, step: int) -> Search:
    """Search a step of a run for its first bad operation.

    Raises:
        GradwatchError: The step is out of reach.
    """
    with restore_step(run, step) as restored:
        located = locate_step(restored)
    weight = located.weight if located else None
    return Search(step=step, located=located, since=bad_since(read(run), weight.name) if weight else None)


def locate_step(restored: RestoredStep) -> Located | None:
    """Return the first bad operation of a restored step, or None if there is none; the state is restored."""
    stepper = restored.stepper()
    restored.restore()
    try:
        shares = stepper.objective.shares(restored.window)
        for share, batch, indices_B in zip(shares, restored.window, restored.indices, strict=True):
            step = _forward_backward(stepper, share)
            if share and (located := locate(step, *batch, model=stepper.model)):
                return replace(located, in_data=tuple(int(indices_B[i]) for i in located.samples))
            step(*batch)  # the next micro-batch finds the random generators and statistics that this one leaves
    finally:
        restored.restore()
    return None


def bad_since(history: History, name: str) -> int | None:
    """Return the step whose update made a weight bad, as the history has it, or None where it does not say.

    Args:
        history: Of the run.
        name: Of the parameter.
    """
    layers = [layer.name for layer in history.info.layers]
    if name not in layers:
        return None
    column = layers.index(name)
    steps_T, skipped_T = history.steps("grad.nonfinite"), history["skipped"]
    spoilt_T = (history["grad.nonfinite"][:, column] > 0) & (skipped_T != 1)
    if spoilt_T.any():
        return int(steps_T[np.argmax(spoilt_T)])
    norm_T = history["weight.l2"][:, column]
    steps_T = history.steps("weight.l2")
    known_T = np.isfinite(norm_T)
    if not known_T.any():
        return None
    grown_T = known_T & (norm_T > GROWN * max(norm_T[known_T][0], 1e-30))
    return int(steps_T[np.argmax(grown_T)]) if grown_T.any() else None


def _forward_backward(stepper: Stepper, share: float) -> Callable[..., Tensor]:
    """Return the forward and backward pass of one micro-batch as a function of it, as the stepper makes them."""

    def step(inputs: Any, targets: Tensor) -> Tensor:
        _, loss = stepper.forward(*to_device((inputs, targets), stepper.device))
        part = loss * share if share != 1.0 else loss
        (stepper.scaler.scale(part) if stepper.scaler else part).backward()
        return loss

    return step
