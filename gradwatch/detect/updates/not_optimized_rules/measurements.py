"""Read measured updates and weight norms, and report the tensors that do not move."""

# T = steps that measured the updates, L = parameter tensors

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from gradwatch.detect.features.finding import HasCode, finding_of, subject
from gradwatch.detect.features.recovery import start_of_state
from gradwatch.detect.features.scope import joined_modules
from gradwatch.detect.features.structure import structure_of
from gradwatch.history.store import WINDOW, Floats, History
from gradwatch.records import Finding, Quantity, Severity

STEPS_PER_MEASUREMENT = 16
"""Steps in which the default schedule measures updates at least once, so that a short window is usually enough."""


def measured_updates(history: History, count: int) -> tuple[Floats, Floats]:
    """Return `update.ratio` and `weight.l2` at up to `count` newest steps that measured them: (T, L) each."""
    ratio_TL = history.param.window("update.ratio", min(STEPS_PER_MEASUREMENT * count, WINDOW))
    known = np.flatnonzero(~np.isnan(ratio_TL).all(axis=1))
    if len(known) < count:
        ratio_TL = history.param.window("update.ratio")  # a custom schedule measures less often
        known = np.flatnonzero(~np.isnan(ratio_TL).all(axis=1))
    newest = known[-count:]
    return ratio_TL[newest], history.param.window("weight.l2", len(ratio_TL))[newest]


def has_gradient(history: History, *, least: float) -> NDArray[np.bool_]:
    """Return which tensors get gradients above the rounding error of the largest, of shape (L,).

    One that is the same to the last digit is left from an earlier step: nothing clears it, and nothing adds to it.

    Args:
        history: History of the run.
        least: Size of a gradient element, in units of the largest tensor's, up to which it may be rounding error.
    """
    l2_TL = history.param.window("grad.l2", STEPS_PER_MEASUREMENT)
    is_left_L = (l2_TL == l2_TL[0]).all(axis=0) & (len(l2_TL) > 1)
    size_L = l2_TL[-1] / structure_of(history).rms_scale_L
    return np.asarray((size_L > least * np.fmax.reduce(size_L)) & ~is_left_L)


def findings_of(
    detector: HasCode,
    history: History,
    affected_L: NDArray[np.bool_],
    *,
    severity: Severity,
    what: str,
    thawed: bool = False,
) -> Iterator[Finding]:
    """Yield one finding for all modules with tensors that do not move.

    Args:
        detector: Detector of the findings.
        history: History at the step of the finding.
        affected_L: Which tensors do not move.
        severity: Harm to the training.
        what: Message after the name of the module.
        thawed: Whether these tensors were not trainable when the monitor attached.
    """
    ratio_TL = history.param.window("update.ratio")
    for names, group in joined_modules(history, affected_L, kind=detector.kind, severity=severity, thawed=thawed):
        largest = float(history.param.newest("grad.l2")[group].max())
        ratio = float(np.nan_to_num(history.param.newest("update.ratio")[group]).max())
        yield finding_of(
            detector,
            history,
            f"{subject(names)} {what}",
            Quantity(key="tensors", value=float(len(group))),
            Quantity(key="grad.l2.largest", label="largest grad.l2", value=largest),
            Quantity(key="update.ratio", value=ratio),
            layers=names,
            severity=severity,
            onset=start_of_state(~np.any(ratio_TL[:, group] > 0, axis=1), history.param.steps()),
        )
