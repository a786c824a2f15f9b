"""Measure the learning rates and norms of a run that conditions and remedies use."""

# T = steps, L = parameter tensors

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from gradwatch.detect.features.lr_schedule import last_jump
from gradwatch.history.store import History

RATE_JUMP = 3.0
"""Factor above all earlier rates that counts as a jump: warm-ups rise in smaller steps."""

WARMUP_STEPS = 8
"""Steps at a rate before a rise counts as a jump: the first steps of a warm-up multiply the rate as well."""

USUAL_STEPS = 64
"""Number of first finite gradient norms in the median that defines the usual norm."""

CLIPPED_FRAC = 0.999
"""Norm after clipping over the norm before it, below which a gradient counts as clipped."""

KAIMING_TOLERANCE = 0.2
"""Relative difference of the norm of a weight matrix from the norm that Kaiming initialization gives it."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunNumbers:
    """The numbers that remedies are computed from; nan if unknown.

    Args:
        steady_rate: The largest rate before the jump, or the largest of all without a jump.
        jumped_at: Step of the jump, or None.
        usual_norm: Median of the first `USUAL_STEPS` finite gradient norms.
        update_ratio: Median update/weight ratio of the newest sample.
        largest_ratio: Largest median update/weight ratio of a sample.
        first_rate: Learning rate of the first step.
        rate: Learning rate at the step of the finding.
        is_clipped: Whether a gradient was ever clipped.
        is_kaiming: Whether all weight matrices began at the size that Kaiming initialization gives them.
    """

    steady_rate: float
    jumped_at: int | None
    usual_norm: float
    update_ratio: float
    largest_ratio: float = math.nan
    first_rate: float = math.nan
    rate: float = math.nan
    is_clipped: bool = False
    is_kaiming: bool = False


def measure_run(history: History, *, until: int) -> RunNumbers:
    """Return the numbers of a history.

    Args:
        history: History of the run.
        until: Last step at which the learning rate counts: a later jump has caused nothing yet.
    """
    steps_T = history.steps("lr.0")
    rate_T = history["lr.0"][steps_T <= until]
    jump = last_jump(rate_T, RATE_JUMP)
    jump = None if jump is None or jump < WARMUP_STEPS else jump
    norm_T = history["grad_norm.before_clip"]
    usual_T = norm_T[np.isfinite(norm_T)][:USUAL_STEPS]
    ratio_TL = history.param.window("update.ratio")
    # updates are measured at some steps only
    ratio_T = ratio_TL[np.isfinite(ratio_TL).any(axis=1)]
    medians_T = np.nanmedian(ratio_T, axis=1)
    newest = ratio_T[-1][np.isfinite(ratio_T[-1])] if len(ratio_T) else ratio_T
    return RunNumbers(
        steady_rate=float(np.fmax.reduce(rate_T[: len(rate_T) if jump is None else jump], initial=math.nan)),
        jumped_at=None if jump is None else int(steps_T[jump]),
        usual_norm=float(np.median(usual_T)) if len(usual_T) else math.nan,
        update_ratio=float(np.median(newest)) if len(newest) else math.nan,
        largest_ratio=float(np.max(medians_T)) if len(medians_T) else math.nan,
        first_rate=float(rate_T[0]) if len(rate_T) else math.nan,
        rate=float(rate_T[-1]) if len(rate_T) else math.nan,
        is_clipped=is_clipped(history),
        is_kaiming=_is_kaiming(history),
    )


def is_clipped(history: History) -> bool:
    """Return whether a gradient of a run was ever clipped."""
    return bool(np.any(history["grad_norm.after_clip"] < CLIPPED_FRAC * history["grad_norm.before_clip"]))


def first_weights(history: History, tensors: Sequence[int]) -> NDArray[np.floating[Any]]:
    """Return the first measured norms of some tensors; steps that a gradient scaler skips measure none."""
    norm_TL = history["weight.l2"][:, tensors]
    measured_TL: NDArray[np.floating[Any]] = norm_TL[~np.isnan(norm_TL).all(axis=1)]
    return measured_TL[:1].ravel()


def kaiming_ratios(history: History) -> NDArray[np.floating[Any]]:
    """Return the first norm of each weight matrix over the norm that Kaiming initialization gives it."""
    matrices = [
        i for i, la in enumerate(history.info.layers) if len(la.shape) >= 2 and "Embedding" not in la.module_type
    ]
    first_L = first_weights(history, matrices)
    # numel weights of variance 2 / fan-in, with numel = fan-out x fan-in
    expected_L = np.sqrt([2.0 * history.info.layers[i].shape[0] for i in matrices])
    ratio_L: NDArray[np.floating[Any]] = first_L / expected_L if first_L.size else first_L
    return ratio_L


def _is_kaiming(history: History) -> bool:
    ratio_L = kaiming_ratios(history)
    return bool(ratio_L.size) and bool(np.all(np.abs(ratio_L - 1) < KAIMING_TOLERANCE))
