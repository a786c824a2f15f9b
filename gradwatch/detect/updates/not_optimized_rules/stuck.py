"""Find parameters that an optimizer holds and that never move."""

# T = steps that measured the updates, L = parameter tensors, M = weight matrices and kernels, G = optimizer groups

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from gradwatch.detect.features.consequences import severity_after
from gradwatch.detect.features.events import events_of
from gradwatch.detect.features.finding import HasCode, finding_of
from gradwatch.detect.features.recovery import tensors_of
from gradwatch.detect.features.structure import structure_of
from gradwatch.detect.features.unmade_updates import are_updates_missing, have_converged
from gradwatch.detect.updates.not_optimized_rules.measurements import (
    findings_of,
    has_gradient,
    measured_updates,
)
from gradwatch.events import OPTIMIZER_REBUILT, WEIGHTS_CLIPPED, WEIGHTS_STILL
from gradwatch.history.store import Floats, History
from gradwatch.records import Finding, Quantity, Severity

ENDED = "updates.ended"
"""Key of the evidence that updates have ended."""


def find_unchanged_parameters(
    detector: HasCode, history: History, *, samples: int, gradient: float, moving: float
) -> Iterator[Finding]:
    """Yield the tensors with a gradient and zero updates in a row, and those at a learning rate of 0.

    Their norms must stay constant, too: otherwise something other than the optimizer moves them.

    Args:
        detector: Detector of the findings.
        history: History of the run.
        samples: Measured updates in a row that must be zero.
        gradient: Size of a gradient element, in units of the largest tensor's, up to which a tensor need not move.
        moving: Update/weight ratio that some other tensor must have.
    """
    ratio_TL, norm_TL = measured_updates(history, samples)
    if len(ratio_TL) < samples or not _others_move(history, ratio_TL, moving):
        return
    stuck_L = (ratio_TL == 0).all(axis=0) & (norm_TL == norm_TL[0]).all(axis=0)
    stuck_L &= has_gradient(history, least=gradient) & ~_is_clipped(history) & ~have_converged(history, ratio_TL)
    # an update that is lost in rounding is a consequence of a tiny rate
    slow = [f for f in history.findings if f.kind == "learning-rate-too-low" and f.names]
    stuck_L[[i for finding in slow for i in tensors_of(history, finding)]] = False
    rate_L = _learning_rates(history)
    yield from findings_of(
        detector,
        history,
        stuck_L & (rate_L > 0),
        severity=severity_after(history, detector.kind),
        what="has a gradient and a learning rate but never changes",
    )
    is_first = not stuck_L.any() or np.flatnonzero(rate_L == 0).max(initial=-1) < np.argmax(rate_L > 0)
    yield from findings_of(
        detector,
        history,
        stuck_L & (rate_L == 0),
        severity=Severity.INFO if is_first else Severity.WARNING,  # first layers may be frozen on purpose
        what="gets gradients but has a learning rate of 0",
    )


def find_missing_updates(detector: HasCode, history: History, *, samples: int) -> Iterator[Finding]:
    """Yield the run if all measured updates are exactly 0 at a rate that would move the weights visibly."""
    if are_updates_missing(history, samples=samples):
        rate = float(history.run.newest("lr.0")[0])
        yield finding_of(
            detector,
            history,
            f"no update is made: each measured update is exactly 0, at a learning rate of {rate:.3g}",
            Quantity(key="update.ratio.largest", label="largest update.ratio", value=0.0),
            Quantity(key="lr.0", value=rate),
            Quantity(key="grad_norm.before_clip", value=float(history.run.newest("grad_norm.before_clip")[0])),
            severity=Severity.CRITICAL,
        )


def find_uncalled_optimizers(detector: HasCode, history: History) -> Iterator[Finding]:
    """Yield the run if no optimizer has made a step and most weights have not moved, though there are gradients."""
    for event in events_of(history, WEIGHTS_STILL):
        norm = float(history.run.newest("grad_norm.before_clip")[0])
        if (history["skipped"] == 1).all() and norm > 0 and math.isfinite(norm) and not _has_scaler(history):
            yield finding_of(
                detector,
                history,
                f"no optimizer has made a step: {event.text}",
                Quantity(key="update.ratio.largest", label="largest update.ratio", value=0.0),
                Quantity(key="grad_norm.before_clip", value=norm),
                onset=int(history.steps("skipped")[0]),
                severity=Severity.CRITICAL,
            )


def find_ended_updates(detector: HasCode, history: History, *, steps: int) -> Iterator[Finding]:
    """Yield the run if steps go on without updates, and without a backward pass that reaches a watched parameter.

    Args:
        detector: Detector of the findings.
        history: History of the run.
        steps: Minimum number of steps since the last update. Their gradients are the same, number by number.
    """
    is_skipped_T = history.scalar("skipped") == 1
    ended = int(np.argmin(is_skipped_T[::-1]))  # 0 if all of the window are skipped, too
    if ended < steps or _has_scaler(history):
        return
    l2_TL = history.param.window("grad.l2", ended)
    if not np.array_equal(l2_TL, np.broadcast_to(l2_TL[0], l2_TL.shape), equal_nan=True):
        return
    onset = int(history.steps("skipped")[-ended])
    yield finding_of(
        detector,
        history,
        f"nothing that is watched is trained since step {onset}: no optimizer has stepped, and no gradient has changed",
        Quantity(key=ENDED, label="steps since the last update", value=float(ended), unit="steps"),
        onset=onset,
        severity=Severity.WARNING,
    )


def find_rebuilt_optimizers(detector: HasCode, history: History) -> Iterator[Finding]:
    """Yield the run if a new optimizer makes each update."""
    for event in events_of(history, OPTIMIZER_REBUILT):
        yield finding_of(
            detector,
            history,
            f"the optimizer loses its state at each update: {event.text}",
            Quantity(key="optimizers", label="new optimizers", value=event.values["updates"]),
            onset=int(history.steps("skipped")[0]),
            severity=Severity.WARNING,
        )


def _has_scaler(history: History) -> bool:
    """Return whether a gradient scaler may skip updates whose gradients overflow; without one, the scale is 1."""
    scale = float(history.run.newest("loss_scale")[0])
    return history.info.loss_scaling or not (scale == 1 or math.isnan(scale))


def _others_move(history: History, ratio_TL: Floats, least: float) -> bool:
    """Return whether a weight matrix moved at each of the steps. Other tensors may start at 0 and move at any rate."""
    matrices_M = structure_of(history).matrices.indices_M
    ratio_TM = ratio_TL[:, matrices_M] if len(matrices_M) else ratio_TL
    return bool((ratio_TM > least).any(axis=1).all())


def _learning_rates(history: History) -> Floats:
    """Return the largest rate in the window of each tensor's group, of shape (L,); nan without a group."""
    rate_G = np.array([np.fmax.reduce(history.scalar(f"lr.{g}")) for g in range(history.groups)])
    group_L = np.array([history.groups if la.group is None else la.group for la in history.info.layers])
    rate_L: Floats = np.append(rate_G, np.nan)[group_L]  # index `groups`, no group, picks nan
    return rate_L


def _is_clipped(history: History) -> NDArray[np.bool_]:
    """Return which tensors the loop clips: all of their values may have reached a bound."""
    is_clipped_L = np.zeros(len(history.info.layers), np.bool_)
    for event in events_of(history, WEIGHTS_CLIPPED):
        is_clipped_L[int(event.values["first"]) : int(event.values["last"]) + 1] = True
    return is_clipped_L
