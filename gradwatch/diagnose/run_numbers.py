"""The learning rates and norms of a run that conditions and remedies are computed from."""

# T = steps, L = parameter tensors

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from gradwatch.history.store import History

RATE_JUMP = 3.0
"""Factor by which the rate must exceed all earlier rates to have jumped: warm-ups rise in smaller steps."""

WARMUP_STEPS = 8
"""Steps at a rate before a rise of it counts as a jump: the first steps of a warm-up multiply it as well."""

USUAL_STEPS = 64
"""First finite gradient norms whose median is the usual norm."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunNumbers:
    """The numbers that remedies are computed from; nan where unknown.

    Args:
        steady_rate: The largest rate before it jumped; the largest of all where it did not.
        jumped_at: Step at which it jumped, or None.
        usual_norm: Median of the finite gradient norms of the first `USUAL_STEPS` steps.
        update_ratio: Median update/weight ratio of the newest sample.
    """

    steady_rate: float
    jumped_at: int | None
    usual_norm: float
    update_ratio: float


def measure_run(history: History, *, until: int) -> RunNumbers:
    """Return the numbers of a history with at least one step.

    Args:
        history: The run.
        until: Step up to which the learning rate is read: a later jump has caused nothing yet.
    """
    steps_T = history.steps("lr.0")
    rate_T = history["lr.0"][steps_T <= until]
    jump = _last_jump(rate_T)
    norm_T = history["grad_norm.before_clip"]
    usual_T = norm_T[np.isfinite(norm_T)][:USUAL_STEPS]
    ratio_TL = history.param.window("update.ratio")
    ratio_T = ratio_TL[np.isfinite(ratio_TL).any(axis=1)]
    newest = ratio_T[-1][np.isfinite(ratio_T[-1])] if len(ratio_T) else ratio_T
    return RunNumbers(
        steady_rate=float(np.fmax.reduce(rate_T[: len(rate_T) if jump is None else jump])),
        jumped_at=None if jump is None else int(steps_T[jump]),
        usual_norm=float(np.median(usual_T)) if len(usual_T) else math.nan,
        update_ratio=float(np.median(newest)) if len(newest) else math.nan,
    )


def _last_jump(rate_T: NDArray[np.floating[Any]]) -> int | None:
    """Return the index at which the rate last rose threefold beyond all earlier rates, or None."""
    before_T = np.maximum.accumulate(rate_T)[:-1]
    jumps = np.flatnonzero((rate_T[1:] >= RATE_JUMP * before_T) & (before_T > 0)) + 1
    return int(jumps[-1]) if len(jumps) and jumps[-1] >= WARMUP_STEPS else None
