"""Decide whether a mild fall over depth does harm: it heals by itself unless the loss stays at its start."""

from __future__ import annotations

from gradwatch.detect.features.baseline import first_loss, newest_loss
from gradwatch.history.store import History
from gradwatch.records import Severity

MEDIAN_STEPS = 10
"""Steps in the median: more than the noise of single batches needs, few enough for an early finding."""

HEALING_STEPS = 50
"""Steps after which a mild fall from the initialization is gone if it heals."""

STUCK_FRAC = 0.9
"""Fraction of the first loss above which the loss is still at its start."""

CRITICAL_DECADES = 6.0
"""Fall at which a common learning rate moves the first layers by less than float32 resolves (2^-24 = 6e-8)."""


def is_stuck(history: History) -> bool:
    """Return whether the loss is still at its start after the steps in which a mild fall heals by itself."""
    return history.step >= HEALING_STEPS and newest_loss(history, MEDIAN_STEPS) > STUCK_FRAC * first_loss(history)


def severity_of_fall(fall: float) -> Severity:
    """Return the severity of a fall over depth, in powers of ten."""
    return Severity.CRITICAL if fall >= CRITICAL_DECADES else Severity.WARNING
