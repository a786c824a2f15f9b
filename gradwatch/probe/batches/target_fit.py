"""Decide over the sampled steps of a run whether predictions fit their own targets better than other ones."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, final

import numpy as np

from gradwatch.detect.features.sequential_test import SequentialTest, allowed_error, critical_sigmas
from gradwatch.events import PAIRED, UNCLEAR, UNPAIRED, EventKind, Observation
from gradwatch.probe.batches.loss_forms import Floats, PairingGain, dot

WINDOW_SAMPLES = 8
"""Number of sampled steps to judge together: with 32 samples each, chance explains 1 % of the loss."""

NO_FIT, FIT, GOOD_FIT = 0.03, 0.06, 0.2
"""Limits of the fraction of the loss of the best constant that predictions explain.

Below the first limit, predictions do not fit; `loss-plateau` uses the same limit for a fall of the loss. At the second
limit, predictions fit again. At the third limit, reading ends.
"""

SURE_ERRORS = 5.0
"""Minimum gain, in standard errors, at which something is learned, however little: clicks may explain no more.

Memorized samples reach less, 3 to 4.
"""

SURE_WINDOWS = 4
"""Windows that are judged together for such a gain: four windows halve its standard error."""

MEMORY_SAMPLES = 128
"""Number of sampled steps whose trend is judged."""

WINDOWS_AHEAD = 4
"""Future spans, each as long as all sampled steps so far, within which predictions certainly will not fit."""

MAX_CHANGES = 8
"""Maximum number of events of one run."""


class Explained(NamedTuple):
    """Fraction of the loss of the best constant that predictions explain, and whether the fraction exceeds chance."""

    share: float
    is_sure: bool


def explained_share(gains: Sequence[PairingGain]) -> Explained:
    """Return the fraction of the loss that predictions explain over some steps.

    Args:
        gains: At least one.
    """
    constant, gain, variance = (sum(column) for column in zip(*gains, strict=True))
    share = gain / (2 * constant) if constant > 0 else 1.0  # the loss falls by half of the gain
    return Explained(share, gain > SURE_ERRORS * math.sqrt(variance))


def highest_share(gains: Sequence[PairingGain], *, sampled: int) -> float:
    """Return an upper bound of the fraction of the loss that predictions will explain, if their trend continues.

    A model that learns slowly explains nothing at first. Few or noisy samples give a high bound, because they would
    not show such a trend.

    Args:
        gains: At least two sampled steps, at equal distances.
        sampled: Number of sampled steps of the run so far. At each of them, a bound may be too low.
    """
    sigmas = _bound_sigmas(sampled)
    gains_T, variances_T = (np.array([getattr(g, field) for g in gains]) for field in ("gain", "variance"))
    place_T: Floats = np.arange(len(gains), dtype=np.float64) - (len(gains) - 1) / 2
    square = dot(place_T, place_T)
    slope, slope_variance = dot(place_T, gains_T) / square, dot(place_T**2, variances_T) / square**2
    newest = slice(-WINDOW_SAMPLES, None)
    level, level_variance = gains_T[newest].mean(), variances_T[newest].mean() / len(gains_T[newest])
    rise = max(0.0, slope + sigmas * math.sqrt(slope_variance))
    highest = level + sigmas * math.sqrt(level_variance) + WINDOWS_AHEAD * len(gains) * rise
    constant = sum(gain.constant for gain in gains) / len(gains)
    return float(highest / (2 * constant)) if constant > 0 else 1.0  # as in `explained_share`


def _bound_sigmas(sampled: int) -> float:
    """Return the standard errors between an estimate and its bound, so that almost no bound of the run is too low.

    While the sampled steps double, one sum grows. That it passes a bound at any step is at most twice as likely as that
    it does so at the last one (Lévy's inequality). So one look is spent per doubling.
    """
    look = (sampled // WINDOW_SAMPLES).bit_length()
    sides = 2 * 2 * max(1, sampled // MEMORY_SAMPLES)  # level and slope, twice each, in each window that is full
    return critical_sigmas(allowed_error(SequentialTest.UNPAIRED_TARGETS, look, among=sides))


@final
class FitState:
    """Decide over the sampled steps of a run whether predictions fit, with hysteresis, and when to stop reading.

    Attributes:
        is_over: Whether nothing more is read: the fit is good or changed too often, or the loss has another form.
    """

    def __init__(self) -> None:
        self._gains: deque[PairingGain] = deque(maxlen=MEMORY_SAMPLES)
        self._judgment: EventKind | None = None  # until a window is full
        self._changes = self._misses = self._sampled = 0
        self.is_over = False

    def state(self) -> dict[str, Any]:
        """Return plain data that `restore` reads back."""
        gains = [list(gain) for gain in self._gains]  # lists, since a named tuple is not plain data
        judgment = self._judgment.name if self._judgment else ""
        counts = {"changes": self._changes, "misses": self._misses, "sampled": self._sampled}
        return {"looks": gains, "judgment": judgment, "is_over": self.is_over, **counts}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of `state`."""
        self._gains = deque((PairingGain(*gain) for gain in state["looks"]), maxlen=MEMORY_SAMPLES)
        # checkpoints of earlier versions have a flag only
        judgment = state.get("judgment", UNPAIRED.name if state.get("is_unpaired") else "")
        self._judgment = next((kind for kind in (UNPAIRED, PAIRED, UNCLEAR) if kind.name == judgment), None)
        self.is_over = state["is_over"]
        self._changes, self._misses = state["changes"], state["misses"]
        self._sampled = state.get("sampled", len(self._gains))

    def add(self, gain: PairingGain | None) -> Observation | None:
        """Add a sampled step, and return an observation if it changes whether predictions fit.

        Args:
            gain: Gain of the step, or None if its loss has another form.
        """
        if gain is None:
            # tolerated as long as they are not a window more than the steps that matched
            self._misses += 1
            self.is_over |= self._misses > len(self._gains) + WINDOW_SAMPLES
            return None
        self._gains.append(gain)
        self._sampled += 1
        if len(self._gains) < WINDOW_SAMPLES:
            return None
        gains = list(self._gains)
        share = explained_share(gains[-WINDOW_SAMPLES:]).share
        before, self._judgment = self._judgment, self._judge(gains, share)
        self.is_over |= share >= GOOD_FIT
        # a good fit from the beginning shows in the loss, too, and need not be reported
        if self._judgment is before or (before is None and share >= GOOD_FIT):
            return None
        self._changes += 1
        self.is_over |= self._changes == MAX_CHANGES
        return self._judgment.observe(values={"explained": share})

    def _judge(self, gains: list[PairingGain], share: float) -> EventKind:
        """Return whether predictions fit. Without evidence for or against it, the judgment stays the same."""
        # a small fit may take several windows to show
        windows = (gains[-WINDOW_SAMPLES:], gains[-SURE_WINDOWS * WINDOW_SAMPLES :])
        if share >= FIT or any(explained_share(window).is_sure for window in windows):
            return PAIRED
        if share < NO_FIT and highest_share(gains, sampled=self._sampled) < GOOD_FIT:
            return UNPAIRED
        return self._judgment or UNCLEAR
