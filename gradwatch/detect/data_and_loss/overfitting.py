"""Find a training loss that falls while the validation loss rises (GW504)."""

# T = steps of a window, V = validations

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
from numpy.typing import NDArray

from gradwatch.detect import Example
from gradwatch.detect.features.baseline import first_loss, newest_loss
from gradwatch.detect.features.finding import Sign, findings_of
from gradwatch.detect.features.robust_stats import Floats, median
from gradwatch.detect.features.sequential_test import SequentialTest, allowed_error, critical_sigmas
from gradwatch.history.store import History, Rows
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Finding, Quantity

SECOND_DIFFERENCE_SIGMAS = 1.65
"""Median size of the second differences of pure noise, in standard deviations: 0.6745 times the root of 6."""

TREND_VALIDATIONS = 64
"""Newest validations that show a trend: more would add little, and their exact distribution takes longer."""

NEAR_STEPS = 8
"""Steps before and after a validation that select its training losses."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Overfitting:
    """A training loss that falls while the validation loss rises.

    What it measures: how far, and for how many validations, the validation loss has been above its best while the
    training loss fell.

    Why it matters: after the best validation the model only memorizes its training data.

    Example: `nn.Linear(784, 4096)` layers, trained for 100 epochs on `Subset(train_set, range(500))`.

    What to do: keep the best checkpoint and stop early. Use more data, augmentation, weight decay, dropout or a smaller
    model. Check the labels: wrong labels are learned last.

    When it is wrong: the loss can rise while the accuracy still rises. Nothing is reported while the validation
    accuracy is at its best.

    How it is detected: (1) The newest `patience` validation losses are above the best by half of `rise`, the newest is
    the highest, within a factor of `peak`, and above it by `rise`, and the rise is clear from the noise. Noisy
    validations, from few samples or a large learning rate before a normalization, go up and down again. So the mean
    since the best must be further above the mean around it than the noise explains. (2) The validations since the best
    have a rising trend, and the newest is above the best by `steady`. The trend is Kendall's: in most pairs of
    validations the later one is the higher one, more often than chance explains. Both chances are shares of the error
    budget, and each further validation spends less of it. (3) The training loss is below `by_heart` of the first, and
    the validation loss is above `missed` of it and no longer falls: the training data are memorized. Both losses must
    be in one unit: the first validation loss is at most `unit` times the training loss around it.

    Source: Prechelt 1998, "Early stopping - but when?", https://doi.org/10.1007/3-540-49430-8_3 (generalization loss);
    Zhang et al. 2017, https://arxiv.org/abs/1611.03530; Kendall 1938, https://doi.org/10.1093/biomet/30.1-2.81 (trend).

    Args:
        patience: Validations in a row above the best. 4: noise seldom agrees so often.
        rise: Rise above the best, as a fraction of it. 0.2: losses that did not go on rising stayed below 0.1
            (`scripts/studies/false_alarms.py`).
        steady: Rise above the best, as a fraction of it, with a rising trend. 0.15: between 0.1 and 0.2.
        fall: Training loss, in units of the one around the best validation, below which it counts as falling. 0.8: the
            noise of a plateau stays above.
        by_heart: Training loss, in units of the first, below which the training data are memorized. 0.1: a model that
            learned so much of what all data have in common has learned more than half of other data.
        missed: Validation loss, in units of the first training loss, above which memorizing does not help on other
            data. 0.5: less than half of what training took off was learned for other data too.
        peak: Highest validation loss since the best, in units of the newest, up to which the newest counts as the
            highest, for (1). 1.05: a single validation may be that high by its noise.
        unit: First validation loss, in units of the training loss around it, up to which both losses have one unit,
            for (3). 2: before anything is learned, the same loss of other data is much the same.
    """

    code: ClassVar[str] = "GW504"
    kind: ClassVar[str] = "overfitting"
    every: ClassVar[int] = 1
    patience: int = 4
    rise: float = 0.2
    steady: float = 0.15
    fall: float = 0.8
    by_heart: float = 0.1
    missed: float = 0.5
    peak: float = 1.05
    unit: float = 2.0

    def triggers_T(self, rows: Rows, history: History) -> NDArray[np.bool_]:
        """Select the steps with a validation loss."""
        return ~np.isnan(rows.run_TS[:, history.run.columns["val_loss"]])

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding for the run."""
        yield from findings_of(self, history, [self._sign(history)])

    def can_judge(self, history: History) -> bool:
        """Return whether the run has enough validations, or none at all."""
        known = int(np.isfinite(history["val_loss"]).sum())
        return known == 0 or known > self.patience

    def _sign(self, history: History) -> Sign | None:
        val_T = history["val_loss"]
        is_known_T = np.isfinite(val_T)
        steps_V, val_V = history.steps("val_loss")[is_known_T], val_T[is_known_T]
        # too few validations for a best one with `patience` others after it
        if len(val_V) <= self.patience:
            return None
        best = int(np.argmin(val_V))
        # a rising loss with rising accuracy means overconfident predictions, not worse ones
        if len(val_V) - best <= self.patience or _is_accuracy_best(history):
            return None
        first, train, before = first_loss(history), newest_loss(history), _loss_around(history, steps_V[best])
        # losses of different units, such as a sum and a mean, cannot be compared
        is_one_unit = val_V[0] < self.unit * _loss_around(history, steps_V[0])
        is_known = 0 <= train < self.by_heart * first
        is_memorized = is_one_unit and is_known and val_V[-self.patience :].min() > self.missed * first
        if not (is_memorized or self._has_risen(val_V, best)):
            return None
        # the training loss may rise too: that is not overfitting
        if not train < max(self.fall * before, self.by_heart * first):
            return None
        rise = float(val_V[-1] / val_V[best] - 1)
        share = f" to {100 * train / first:.2g} % of the first" if is_memorized else ""
        return Sign(
            f"the validation loss is {100 * rise:.0f} % above its best (step {steps_V[best]}) "
            f"while the training loss fell{share}",
            (
                Quantity(key="val_loss.best", label="best val_loss", value=float(val_V[best])),
                Quantity(key="val_loss", value=float(val_V[-1])),
                Quantity(key="val_loss.rise_frac", label="rise above the best val_loss", value=rise, unit="0..1"),
                Quantity(key="val_loss.best_step", label="step of the best val_loss", value=float(steps_V[best])),
                Quantity(key="loss.at_best", label="loss at the best val_loss", value=before),
                Quantity(key="loss", value=train),
            ),
            since=int(steps_V[best + 1]),
        )

    def _has_risen(self, val_V: Floats, best: int) -> bool:
        """Return whether the newest validations are clearly above the best, or rise steadily."""
        lowest, newest, look = val_V[best], val_V[-1], len(val_V) - self.patience
        if lowest <= 0:  # a rise in units of the lowest loss means nothing
            return False
        # without the best, which is below the others by choice
        error = allowed_error(SequentialTest.VALIDATION_TREND, look)
        if newest > lowest * (1 + self.steady) and chance_of_trend(val_V[best + 1 :]) <= error:
            return True
        is_above = val_V[-self.patience :].min() > lowest * (1 + self.rise / 2) and newest > lowest * (1 + self.rise)
        is_highest = newest >= val_V[best:].max() / self.peak
        return bool(is_above and is_highest) and _is_clear(val_V, best, look)

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, that stay quiet, and near misses."""
        yield Example("the validation loss turns at step 80", _validated(turn=80, slope=0.01), (None,))
        yield Example("a healthy run", Synthetic(steps=240).history())
        yield Example("the validation loss follows the training loss down", _validated(turn=240, slope=0))
        yield Example(
            "the validation loss rises by a sixth, step by step", _validated(turn=60, slope=0.0012, noise=0), (None,)
        )
        yield Example(
            "the validation loss rises by a sixth, up and down", _validated(turn=60, slope=0.0012, noise=0.05)
        )
        yield Example(
            "the validation loss rises by a fifth, up and down, over many validations", _wavering(rise=0.24), (None,)
        )
        yield Example("the validation loss wavers as much and does not rise", _wavering(rise=0.0))
        yield Example("the validation loss rises by 5 %", _validated(turn=80, slope=0.0004))
        yield Example(
            "the validation loss rises, and the training loss does too", _validated(turn=80, slope=0.01, train=0.01)
        )
        yield Example("the training data are memorized, and other data are not known", _memorized(level=0.8), (None,))
        yield Example("the training data are memorized, and other data are known nearly as well", _memorized(level=0.3))
        yield Example("the validation loss is noisy", _validated(turn=80, slope=0, noise=0.15))


def chance_of_trend(values_V: Floats) -> float:
    """Return the probability that values in random order have as many pairs in rising order (Kendall's tau)."""
    newest_V = values_V[-TREND_VALIDATIONS:]
    earlier, later = np.triu_indices(len(newest_V), 1)
    return float(_rising_tail(len(newest_V))[np.count_nonzero(newest_V[later] > newest_V[earlier])])


@functools.cache
def _rising_tail(count: int) -> Floats:
    """Return the probability that p or more pairs of `count` values in random order are in rising order, p from 0."""
    chance_P = np.ones(1)
    for before in range(1, count):  # a further value is above each number of the values before it equally often
        chance_P = np.convolve(chance_P, np.full(before + 1, 1 / (before + 1)))
    tail_P: Floats = np.cumsum(chance_P[::-1])[::-1]
    return tail_P


def _is_clear(val_V: Floats, best: int, look: int) -> bool:
    """Return whether the validations since the best exceed the ones around the best by more than noise.

    The best of many noisy validations is a lucky one. Second differences ignore trends.
    """
    sigma = float(median(np.abs(np.diff(val_V[best:], 2)))) / SECOND_DIFFERENCE_SIGMAS
    # the neighbors of the best value make up for its luck
    since, around = val_V[best + 1 :], val_V[max(0, best - 1) : best + 2]
    error = sigma * math.sqrt(1 / len(since) + 1 / len(around))
    enough = critical_sigmas(allowed_error(SequentialTest.VALIDATION_RISE, look))
    return bool(since.mean() - around.mean() > enough * error)


def _is_accuracy_best(history: History) -> bool:
    accuracy_T = history["val_accuracy"]
    accuracy_V = accuracy_T[~np.isnan(accuracy_T)]
    return len(accuracy_V) > 1 and bool(accuracy_V[-1] >= accuracy_V.max())


def _loss_around(history: History, step: int) -> float:
    return float(median(history["loss"][np.abs(history.steps("loss") - step) <= NEAR_STEPS]))


def _memorized(*, level: float) -> History:
    """Return a run that memorizes its training data while the validation loss stops at a fraction of the first."""
    made = Synthetic(steps=240)
    made.loss_T = 2.3 * np.maximum(np.exp(-made.t_T / 40), 0.01)
    at_T = made.t_T % 20 == 19
    made.val_loss_T[at_T] = (2.3 * level * (1 + 0.002 * np.sin(made.t_T)) + 0.01 * (made.t_T < 30))[at_T]
    return made.history()


def _wavering(*, rise: float) -> History:
    """Return a run with a noisy validation every 10 steps, which rises by a fraction from step 60 to the end."""
    made = Synthetic(steps=240)
    rng = np.random.default_rng(0)
    at_T, after_T = made.t_T % 10 == 9, np.maximum(made.t_T - 60, 0) / 180
    level_T = (1 + np.exp(-made.t_T / 15)) * (1 + rise * after_T)
    made.val_loss_T[at_T] = (level_T * np.exp(0.02 * rng.standard_normal(made.steps)))[at_T]
    return made.history()


def _validated(*, turn: int, slope: float, noise: float = 0.01, train: float = 0.0) -> History:
    """Return a run with a validation every 20 steps, in which the validation loss rises after a step."""
    made = Synthetic(steps=240)
    rng = np.random.default_rng(0)
    after_T = np.maximum(made.t_T - turn, 0)
    level_T = 0.15 + made.loss_T[np.minimum(made.t_T, turn)] + slope * after_T
    at_T = made.t_T % 20 == 19
    made.val_loss_T[at_T] = (level_T * np.exp(noise * rng.standard_normal(made.steps)))[at_T]
    made.loss_T = made.loss_T + train * after_T
    return made.history()
