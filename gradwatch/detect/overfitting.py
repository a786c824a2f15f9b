"""GW504: the training loss falls while the validation loss rises."""

# T = steps of a window, V = validations

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
from numpy.typing import NDArray

from gradwatch.detect import Example
from gradwatch.detect._finding import finding_of
from gradwatch.detect._follow_on import settled
from gradwatch.detect._robust import Floats, median
from gradwatch.history.ahead import Ahead
from gradwatch.history.store import History
from gradwatch.history.synthetic import Synthetic
from gradwatch.records import Finding, Quantity


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Overfitting:
    """A training loss that falls while the validation loss rises.

    What it measures: the validation losses of the whole run: how far and for how many validations in a row they have
    been above the best one, the newest of them the highest, while the training loss went on falling. Half of that rise
    and a little more will do where `streak` validations in a row were each above the one before: of values without a
    trend so many are in rising order once in (streak + 1)!, 5040 times, whatever their noise. Validation that is noisy
    (a large rate before a normalisation's averages) goes up and down again.

    Why it matters: from the best validation on, the model learns what holds for its training data only.

    When it is wrong: the loss can rise (fewer, surer mistakes) while accuracy does too; where the validation accuracy
    is at its best, nothing is reported.

    What to do: keep the checkpoint of the best validation and stop early; more or augmented data; weight decay,
    dropout, a smaller model; look for wrong labels, which are learned last.

    Source: Prechelt 1998, "Early stopping - but when?", https://doi.org/10.1007/3-540-49430-8_3 (generalisation
    loss); Zhang et al. 2017, https://arxiv.org/abs/1611.03530.

    Args:
        every: Steps between two looks, each at all validations since the last. 1: only a step that was validated is
            looked at, and the last one of a run is too.
        patience: Validations in a row above the best. 4: noise seldom agrees so often.
        rise: Rise above the best, as a fraction of it. 0.2: those that did not go on rising stayed below
            0.1 (`scripts/study_healthy.py`).
        streak: Validations in a row, each above the one before. 6: by chance once in 5040.
        steady: Rise above the best, as a fraction of it, after such a streak. 0.15: between 0.1 and 0.2.
        fall: Training loss, in units of that around the best validation, below which it counts as falling.
            0.8: a plateau's noise stays above.
    """

    code: ClassVar[str] = "GW504"
    kind: ClassVar[str] = "overfitting"
    every: int = 1
    patience: int = 4
    rise: float = 0.2
    streak: int = 6
    steady: float = 0.15
    fall: float = 0.8

    def rules_out(self, ahead: Ahead) -> NDArray[np.bool_]:
        """Say at which steps nothing was validated, where each step is looked at by itself."""
        return np.isnan(ahead.scalar("val_loss")) & (self.every == 1)

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding for the run."""
        if np.isnan(history.scalar("val_loss", self.every)).all():
            return
        steps_T, val_T = history.steps("val_loss"), history["val_loss"]
        known_T = np.isfinite(val_T)
        steps_V, val_V = steps_T[known_T], val_T[known_T]
        best = int(np.argmin(val_V)) if len(val_V) else 0
        if len(val_V) - best <= self.patience or not self._has_risen(val_V, best) or _is_best_now(history):
            return
        train = float(median(history.scalar("loss", 16)))
        near = np.abs(steps_T - steps_V[best]) <= 8
        before = float(median(history["loss"][near]))
        if not train < self.fall * before:
            return
        rise = 100 * float(val_V[-1] / val_V[best] - 1)
        yield finding_of(
            self,
            history,
            f"the validation loss is {rise:.0f} % above that of step {steps_V[best]}, the training loss fell",
            Quantity(name="best val_loss", value=float(val_V[best])),
            Quantity(name="val_loss", value=float(val_V[-1])),
            Quantity(name="rise above the best", value=rise / 100, unit="0..1"),
            Quantity(name="step of the best", value=float(steps_V[best])),
            Quantity(name="loss around the best", value=before),
            Quantity(name="loss", value=train),
            severity=settled(history, self.kind),
        )

    def _has_risen(self, val_V: Floats, best: int) -> bool:
        """Say whether the newest validations are clearly above the best, and nearly each above the one before."""
        is_steady = len(val_V) > self.streak and bool((np.diff(val_V[-self.streak - 1 :]) > 0).all())
        if is_steady and val_V[-1] > val_V[best] * (1 + self.steady) > 0:
            return True
        newest_V = val_V[-self.patience :]
        is_above = val_V[best] > 0 and newest_V.min() > val_V[best] * (1 + self.rise / 2)
        is_rising = newest_V[-1] >= val_V[best:].max() / 1.05
        return bool(is_above and is_rising and newest_V[-1] > val_V[best] * (1 + self.rise))

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
        yield Example("it is noisy", _validated(turn=80, slope=0, noise=0.15))


def _is_best_now(history: History) -> bool:
    """Say whether the newest validation accuracy is the best there was."""
    accuracy_T = history["val_accuracy"]
    accuracy_V = accuracy_T[~np.isnan(accuracy_T)]
    return len(accuracy_V) > 1 and bool(accuracy_V[-1] >= accuracy_V.max())


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
