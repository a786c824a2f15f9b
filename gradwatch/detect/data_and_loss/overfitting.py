"""GW504: the training loss falls while the validation loss rises."""

# T = steps of a window, V = validations

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
from numpy.typing import NDArray

from gradwatch.detect import Example
from gradwatch.detect.features.baseline import first_steps
from gradwatch.detect.features.consequences import severity_after
from gradwatch.detect.features.finding import finding_of
from gradwatch.detect.features.robust_stats import Floats, median
from gradwatch.history.store import History, Rows
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Finding, Quantity

NOISE_OF_SECOND = 1.65
"""Median size of a second difference of values that are noise, in their deviations: 0.6745 times the root of 6."""

CLEAR = 2.5
"""Deviations by which means of three and more differ by chance once in a thousand times."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Overfitting:
    """A training loss that falls while the validation loss rises.

    What it measures: the validation losses of the whole run: how far and for how many validations in a row they have
    been above the best one, the newest of them the highest, while the training loss went on falling. Half of that rise
    and a little more will do where `streak` validations in a row were each above the one before: of values without a
    trend so many are in rising order once in (streak + 1)!, 5040 times, whatever their noise. Validation that is noisy
    (a large rate before a normalisation's averages, few samples) goes up and down again: what came since the best must
    be above those around it by 2.5 deviations of that noise.

    A training loss that is down to a tenth of the first counts as having fallen; and where the validation loss then
    still is at half of the first, it need not rise, but only fall no more: the training data are known by heart, and
    that tells nothing of others. (Both must be of one unit: the first validation is no more than twice the training
    loss around it.)

    Why it matters: from the best validation on, the model learns what holds for its training data only.

    When it is wrong: the loss can rise (fewer, surer mistakes) while accuracy does too; where the validation accuracy
    is at its best, nothing is reported.

    What to do: keep the checkpoint of the best validation and stop early; more or augmented data; weight decay,
    dropout, a smaller model; look for wrong labels, which are learned last.

    Source: Prechelt 1998, "Early stopping - but when?", https://doi.org/10.1007/3-540-49430-8_3 (generalisation
    loss); Zhang et al. 2017, https://arxiv.org/abs/1611.03530.

    Args:
        patience: Validations in a row above the best. 4: noise seldom agrees so often.
        rise: Rise above the best, as a fraction of it. 0.2: those that did not go on rising stayed below
            0.1 (`scripts/studies/false_alarms.py`).
        streak: Validations in a row, each above the one before. 6: by chance once in 5040.
        steady: Rise above the best, as a fraction of it, after such a streak. 0.15: between 0.1 and 0.2.
        fall: Training loss, in units of that around the best validation, below which it counts as falling.
            0.8: a plateau's noise stays above.
        by_heart: Training loss, in units of the first, below which the training data are known. 0.1: who has that much
            by what all data have in common does not miss half of it in others.
        missed: Validation loss, in the same unit, above which that is no help to other data. 0.5: of what learning the
            training data took off, less than half was learned of what they have in common with others.
    """

    code: ClassVar[str] = "GW504"
    kind: ClassVar[str] = "overfitting"
    every: ClassVar[int] = 1
    patience: int = 4
    rise: float = 0.2
    streak: int = 6
    steady: float = 0.15
    fall: float = 0.8
    by_heart: float = 0.1
    missed: float = 0.5

    def triggers_T(self, rows: Rows, history: History) -> NDArray[np.bool_]:
        """Select the steps with a validation loss."""
        return ~np.isnan(rows.run_TS[:, history.run.columns["val_loss"]])

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding for the run."""
        steps_T, val_T = history.steps("val_loss"), history["val_loss"]
        known_T = np.isfinite(val_T)
        steps_V, val_V = steps_T[known_T], val_T[known_T]
        best = int(np.argmin(val_V)) if len(val_V) else 0
        if len(val_V) - best <= self.patience or _is_best_now(history):
            return
        first = float(median(first_steps(history, "loss")))
        is_by_heart = self._is_by_heart(history, val_V, first) and val_V[0] < 2 * _around(history, steps_V[0])
        if not is_by_heart and not self._has_risen(val_V, best):
            return
        train, before = float(median(history.scalar("loss", 16))), _around(history, steps_V[best])
        if not train < max(self.fall * before, self.by_heart * first):
            return
        rise = 100 * float(val_V[-1] / val_V[best] - 1)
        yield finding_of(
            self,
            history,
            f"the validation loss is {rise:.0f} % above that of step {steps_V[best]}, the training loss fell"
            + (f" to {100 * train / first:.2g} % of the first" if is_by_heart else ""),
            Quantity(key="val_loss.best", label="best val_loss", value=float(val_V[best])),
            Quantity(key="val_loss", value=float(val_V[-1])),
            Quantity(key="val_loss.rise_frac", label="rise above the best", value=rise / 100, unit="0..1"),
            Quantity(key="val_loss.best_step", label="step of the best", value=float(steps_V[best])),
            Quantity(key="loss.at_best", label="loss around the best", value=before),
            Quantity(key="loss", value=train),
            severity=severity_after(history, self.kind),
        )

    def _is_by_heart(self, history: History, val_V: Floats, first: float) -> bool:
        """Say whether next to nothing of the training loss is left, and of the validation loss most."""
        newest_V, train = val_V[-self.patience :], float(median(history.scalar("loss", 16)))
        return 0 <= train < self.by_heart * first and bool(newest_V.min() > self.missed * first)

    def _has_risen(self, val_V: Floats, best: int) -> bool:
        """Say whether the newest validations are clearly above the best, and nearly each above the one before."""
        is_steady = len(val_V) > self.streak and bool((np.diff(val_V[-self.streak - 1 :]) > 0).all())
        if is_steady and val_V[-1] > val_V[best] * (1 + self.steady) > 0:
            return True
        newest_V = val_V[-self.patience :]
        is_above = val_V[best] > 0 and newest_V.min() > val_V[best] * (1 + self.rise / 2)
        is_rising = newest_V[-1] >= val_V[best:].max() / 1.05
        return bool(is_above and is_rising and newest_V[-1] > val_V[best] * (1 + self.rise)) and _is_clear(val_V, best)

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, that stay quiet, and near misses."""
        yield Example("the validation loss turns at step 80", _validated(turn=80, slope=0.01), (None,))
        yield Example("a healthy run", Synthetic(steps=240).history())
        yield Example("the validation loss follows the training loss down", _validated(turn=240, slope=0))
        yield Example(
            "it rises by a sixth, at each of many validations", _validated(turn=60, slope=0.0012, noise=0), (None,)
        )
        yield Example("it rises by a sixth, up and down", _validated(turn=60, slope=0.0012, noise=0.05))
        yield Example("it rises by a twentieth", _validated(turn=80, slope=0.0004))
        yield Example("it rises, and the training loss does too", _validated(turn=80, slope=0.01, train=0.01))
        yield Example("the training data are known by heart, and others are not", _by_heart(level=0.8), (None,))
        yield Example("they are known by heart, and others nearly so", _by_heart(level=0.3))
        yield Example("it is noisy", _validated(turn=80, slope=0, noise=0.15))


def _is_clear(val_V: Floats, best: int) -> bool:
    """Say whether validations since the best one differ from those around it by more than their noise.

    The best of many noisy ones is a lucky one. Second differences leave trends out: their median is 1.65 deviations.
    """
    noise = float(median(np.abs(np.diff(val_V[best:], 2)))) / NOISE_OF_SECOND
    return bool(val_V[best + 1 :].mean() - val_V[max(0, best - 1) : best + 2].mean() > CLEAR * noise)


def _is_best_now(history: History) -> bool:
    """Say whether the newest validation accuracy is the best there was."""
    accuracy_T = history["val_accuracy"]
    accuracy_V = accuracy_T[~np.isnan(accuracy_T)]
    return len(accuracy_V) > 1 and bool(accuracy_V[-1] >= accuracy_V.max())


def _by_heart(*, level: float) -> History:
    """Return a run that has learned its training data, and whose validation loss stops at a level of the first."""
    made = Synthetic(steps=240)
    made.loss_T = 2.3 * np.maximum(np.exp(-made.t_T / 40), 0.01)
    at_T = made.t_T % 20 == 19
    made.val_loss_T[at_T] = (2.3 * level * (1 + 0.002 * np.sin(made.t_T)) + 0.01 * (made.t_T < 30))[at_T]
    return made.history()


def _around(history: History, step: int) -> float:
    """Return the median training loss around a step."""
    return float(median(history["loss"][np.abs(history.steps("loss") - step) <= 8]))


def _validated(*, turn: int, slope: float, noise: float = 0.01, train: float = 0.0) -> History:
    """Return a run that is validated every 20 steps, with a validation loss that rises from a step on."""
    made = Synthetic(steps=240)
    rng = np.random.default_rng(0)
    after_T = np.maximum(made.t_T - turn, 0)
    level_T = 0.15 + made.loss_T[np.minimum(made.t_T, turn)] + slope * after_T
    at_T = made.t_T % 20 == 19
    made.val_loss_T[at_T] = (level_T * np.exp(noise * rng.standard_normal(made.steps)))[at_T]
    made.loss_T = made.loss_T + train * after_T
    return made.history()
