"""GW302: updates so large that the weights lose what they were, or a jump of the rate that the loss answers."""

# T = steps of a window, M = weight matrices and kernels

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, final

import numpy as np
from numpy.typing import NDArray

from gradwatch.detect import Example
from gradwatch.detect._beginning import beginning
from gradwatch.detect._depth import depth
from gradwatch.detect._finding import finding_of
from gradwatch.detect._follow_on import settled
from gradwatch.detect._robust import block_medians, log10, median
from gradwatch.detect._schedule import SPAN as SPAN_OF_JUMP
from gradwatch.detect._schedule import last_jump
from gradwatch.detect._words import factor
from gradwatch.history.ahead import Ahead
from gradwatch.history.store import History
from gradwatch.history.synthetic import Synthetic
from gradwatch.records import Finding, Quantity, Severity

SAMPLES = 3
"""Measurements of updates in a row that must be large."""

SPAN = 20
"""Steps over which growth is measured: two samples of the weights at the default schedule."""

AFTER = 6
"""Steps before and after a jump of the rate that show what the loss does. (The start of a warm-up is no jump.)"""


HARMED = 1.05
"""Loss after an update, in units of that before, from which on it is worse: where nothing has been learned yet, as at a
cold start of embeddings, batches alone make a hundredth."""

CLIMB = 4
"""Steps in a row at which a loss that runs away has risen: noise does so once in 120 times."""

SMALL = 0.05
"""Size of a weight matrix, in units of the one that keeps the size of the signal, below which it started near zero."""

DEFAULT = 0.577
"""The same for the default initialisation of linear layers and convolutions, uniform within 1 / root of the inputs."""

LEARNED = 0.5
"""Part of the first loss that must be gone for growth to do no harm; a third is gone with the mean of the targets."""

LINEAR = 0.1
"""The same of a model of one matrix, which was not drawn as anything that could be lost."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRateTooHigh:
    """Updates that are too large for the weights they move.

    What it measures: five things. (1) The update/weight ratio, as the median over the weight matrices: an update as
    large as what it moves replaces it. (2) How much the norms of the weight matrices have grown over the last 20 steps,
    as the median over matrices: where a few updates make weights several times larger, what they were drawn as or had
    learned is gone. (3) A learning rate that rises beyond all that it was before, by `jump`, and a loss that is higher
    after it than before, or one that rises by that step by step while updates are `large`. (4) A loss that, as median
    over 20 steps, is `above_start` times what it was before the first update, while at each of the newest 3
    measurements an update was `large` beside the weights: what is learned is overshot each time. (5) Within the first
    20 steps, a loss that has risen at each of the last 4 and is `runaway` times the first, where the first update was
    `large`. It is critical, where nothing else was found before it, once what was learned is lost: the run is
    non-finite, or the loss, as median over 6 steps, is `lost` times the lowest that it was and no lower than in the
    beginning.

    Why it matters: beyond 2 / curvature each step overshoots the valley by more than it came from.

    When it is wrong: weights drawn near zero on purpose grow by many times; such matrices count from the size of
    default initialisation on, and not at all below a twentieth of the usual. A linear model whose classes are far apart
    wants large weights: growth does no harm (info) where half of the first loss is gone, or in a linear model a tenth.
    A restart to a rate that the run has had before is no jump.

    What to do: a tenth of the rate is the first thing to try; warm up over the first few hundred steps; clip.

    Source: Bottou et al. 2018, sec. 4, https://arxiv.org/abs/1606.04838; Goyal et al. 2017 on warm-up, sec. 2.2,
    https://arxiv.org/abs/1706.02677.

    Args:
        every: Steps between two looks. 5: half of the steps between two measurements of the weights.
        ratio: Update/weight ratio at which to report. 1: an update as large as its weights replaces them. It did harm
            where the loss is higher five steps later than it was before, or the update ten times as large as they.
        growth: Growth of the weights within 20 steps, in powers of ten. 0.5: 3.2 times.
        jump: Rise of the learning rate over its largest value before, as a factor. 3: milestones fall, warm-ups
            rise in small steps.
        above_start: Loss in units of the first at which (4) reports. 3: targets that move, as values in Q-learning do,
            raise it as much, by updates that are small.
        large: Update/weight ratio, median over matrices, for (4). 0.05: fifty times the 1e-3 that rates are chosen for.
        runaway: Loss in units of the first for (5). 100: a start without warm-up overshoots by tens, and comes back.
        worse: Loss after the jump in units of that before. 1.5: a batch is noisier than that seldom, the median of 6
            never was.
        lost: Loss in units of its best at which all that was learned is gone. 3: noise moves a median of 6 by less than
            `worse`, the best one down and the newest one up: 2.25.
    """

    code: ClassVar[str] = "GW302"
    kind: ClassVar[str] = "learning-rate-too-high"
    every: int = 5
    ratio: float = 1.0
    growth: float = 0.5
    jump: float = 3.0
    above_start: float = 3.0
    large: float = 0.05
    runaway: float = 100.0
    worse: float = 1.5
    lost: float = 3.0

    def rules_out(self, ahead: Ahead) -> NDArray[np.bool_]:
        """Say at which steps rate, updates and loss are as they should be, and the weights were not measured."""
        history, matrices_M = ahead.history, depth(ahead.history).matrices_M
        was_found = any(f.kind == self.kind and f.severity == Severity.WARNING for f in history.findings)
        if was_found or not len(history.run.steps(1)):
            return np.zeros(len(ahead), np.bool_)
        rate_DW = ahead.scalars("lr.0", SPAN_OF_JUMP)
        may_D = np.fmax.reduce(rate_DW, axis=1) >= self.jump * np.fmin.reduce(rate_DW, axis=1)
        may_D |= ahead.steps_D < SPAN
        if len(matrices_M):
            may_D |= ahead.scalar("loss") > self.above_start * beginning(history, "loss", 1)[0]
            may_D |= ahead.windows("weight.l2", 1, int(matrices_M[0]))[:, 0] >= 0
            may_D |= self._replaces(ahead)
        return np.asarray(~may_D, np.bool_)

    def _replaces(self, ahead: Ahead) -> NDArray[np.bool_]:
        """Say at which of the next steps an update was larger than what it moved, since the last look."""
        before = min(self.every, len(ahead.history.run.steps(self.every)))
        ratio_TL = ahead.history.param.ahead("update.ratio", before=before)
        age_DT = before + ahead.places_D[:, None] - np.flatnonzero((ratio_TL >= self.ratio).any(axis=1))
        return np.asarray(((age_DT >= 0) & (age_DT <= self.every)).any(axis=1), np.bool_)

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding for the run, one that was made before too: the loss may be lost by now."""
        before = [f for f in history.findings if f.kind == self.kind and f.severity == Severity.WARNING]
        for finding in (*before, *self._found(history)):
            is_lost = finding.severity == Severity.WARNING and _is_first(history, finding) and self._is_lost(history)
            yield self._critical(history, finding) if is_lost else finding

    def _found(self, history: History) -> Iterator[Finding]:
        rate_T = history.scalar("lr.0", SPAN_OF_JUMP)
        if np.fmax.reduce(rate_T) >= self.jump * np.fmin.reduce(rate_T):
            yield from self._jumped(history)
            yield from self._outgrown(history)
        if history.step < SPAN:
            yield from self._ran_away(history)
        matrices_M = depth(history).matrices_M
        if not len(matrices_M):
            return
        if np.fmax.reduce(history.param.window("update.ratio", self.every + 1), axis=None) >= self.ratio:
            yield from self._replaced(history)
        if history.run.newest("loss")[0] > self.above_start * beginning(history, "loss", 1)[0] > 0:
            yield from self._overshot(history)
        if history.step >= self.every and history.param.newest("weight.l2")[matrices_M[0]] >= 0:  # nan is not
            yield from self._grown(history)

    def _finding(
        self, history: History, message: str, *evidence: Quantity, severity: Severity | None = None
    ) -> Finding:
        """Return a finding for the run, by default as grave as it is by itself."""
        return finding_of(
            self,
            history,
            message,
            *evidence,
            severity=settled(history, self.kind) if severity is None else severity,
        )

    def _critical(self, history: History, finding: Finding) -> Finding:
        newest = Quantity(name="loss", value=float(median(history.scalar("loss", AFTER))))
        best = Quantity(name="best loss", value=_best(history))
        message = f"{finding.message}; what was learned is lost"
        return replace(finding, severity=Severity.CRITICAL, message=message, evidence=(*finding.evidence, newest, best))

    def _is_lost(self, history: History) -> bool:
        """Say whether the run has become non-finite, or its loss is far above its best and as high as it began."""
        if any(f.kind == "non-finite" and f.severity == Severity.CRITICAL for f in history.findings):
            return True
        first, newest = float(median(beginning(history, "loss", AFTER))), float(median(history.scalar("loss", AFTER)))
        return newest >= first > 0 and newest >= self.lost * _best(history) > 0

    def _replaced(self, history: History) -> Iterator[Finding]:
        """Yield a finding where an update since the last look, or at it, was larger than the weights it moved."""
        shape, age = depth(history), min(self.every + 1, len(history.param.steps(self.every + 1)))
        ratio_TM = history.param.window("update.ratio", age)[:, shape.matrices_M]
        over_T = 2 * np.count_nonzero(ratio_TM >= self.ratio, axis=1) >= len(shape.matrices_M)
        if not over_T.any():
            return
        at = int(np.argmax(over_T))
        gain_M = history.param.window("weight.l2", age)[at, shape.matrices_M] / shape.root_fan_out_M
        ratio = float(median(np.where(gain_M > SMALL, ratio_TM[at], np.nan)))
        loss_T = history.scalar("loss", age)
        harmful = loss_T[at] + (HARMED - 1) * abs(loss_T[at])
        is_worse = age - at > 3 and not float(median(loss_T[at + 1 :])) < harmful
        if not self.ratio <= ratio < np.inf or not (is_worse or ratio >= 10 * self.ratio):
            return
        rate = float(history.run.newest("lr.0")[0])
        yield self._finding(
            history,
            f"one update at a learning rate of {rate:g} is {factor(ratio)} times as large as the weights it moves",
            Quantity(name="update.ratio, median", value=ratio),
            Quantity(name="lr.0", value=rate),
        )

    def _overshot(self, history: History) -> Iterator[Finding]:
        """Yield a finding where updates are large, and have left the loss far above where it was before the first."""
        first, loss_T = float(beginning(history, "loss", 1)[0]), history.scalar("loss", SPAN)
        matrices_M = depth(history).matrices_M
        ratio_TM = history.param.window("update.ratio")[:, matrices_M]
        measured_T = np.flatnonzero(~np.isnan(ratio_TM).all(axis=1))[-SAMPLES:]
        if len(loss_T) < SPAN or len(measured_T) < SAMPLES or not float(median(loss_T)) >= self.above_start * first:
            return
        gain_M = history.param.window("weight.l2")[measured_T[-1], matrices_M] / depth(history).root_fan_out_M
        ratio_T = median(np.where(gain_M > SMALL, ratio_TM[measured_T], np.nan).T)
        if not ratio_T.min() >= self.large:  # nan, of matrices that started near zero, is not
            return
        rate = float(history.run.newest("lr.0")[0])
        times = float(median(loss_T)) / first
        yield self._finding(
            history,
            f"the loss is {factor(times)} times that before the first update, at a learning rate of {rate:g}",
            Quantity(name="loss in units of the first", value=times),
            Quantity(name="update.ratio, median, smallest of 3", value=float(ratio_T.min())),
            Quantity(name="lr.0", value=rate),
        )

    def _ran_away(self, history: History) -> Iterator[Finding]:
        """Yield a finding where the loss has done nothing but climb since the first update."""
        shape, loss_T = depth(history), history.scalar("loss", SPAN)
        if len(loss_T) <= CLIMB or not loss_T[-1] >= self.runaway * loss_T[0] > 0 or not np.isfinite(loss_T[-1]):
            return
        tensors_M = shape.matrices_M if len(shape.matrices_M) else shape.tables_E
        ratio = float(median(beginning(history, "update.ratio", 1)[0, tensors_M])) if len(tensors_M) else np.nan
        if not (np.diff(loss_T[-CLIMB - 1 :]) > 0).all() or not ratio >= self.large:
            return
        rate, times = float(history.run.newest("lr.0")[0]), float(loss_T[-1] / loss_T[0])
        yield self._finding(
            history,
            f"the loss has climbed {factor(times)} times since the first update, at a learning rate of {rate:g}",
            Quantity(name="loss in units of the first", value=times),
            Quantity(name="update.ratio of the first update, median", value=ratio),
            Quantity(name="lr.0", value=rate),
        )

    def _grown(self, history: History) -> Iterator[Finding]:
        shape = depth(history)
        norm_TL = history.param.window("weight.l2", SPAN + 1)
        at = 0 if norm_TL[0, shape.matrices_M[0]] >= 0 else int(np.argmax(~np.isnan(norm_TL).all(axis=1)))
        first_M, last_M = norm_TL[at, shape.matrices_M], norm_TL[-1, shape.matrices_M]
        if 2 * np.count_nonzero(last_M > 10**self.growth * first_M) < len(first_M):
            return
        gain_M = first_M / shape.root_fan_out_M  # near 1 for weights that keep the size of the signal
        usual_M = np.maximum(first_M, DEFAULT * shape.root_fan_out_M)
        growth = float(median(np.where(gain_M > SMALL, log10(last_M) - log10(usual_M), np.nan)))
        if not growth >= self.growth:
            return
        rate = float(history.run.newest("lr.0")[0])
        yield self._finding(
            history,
            f"the weights grew {factor(10**growth)} times within {SPAN} steps at a learning rate of {rate:g}",
            Quantity(name="growth of weight.l2, median", value=growth, unit="decades"),
            Quantity(name="update.ratio, median", value=_update_ratio(history)),
            Quantity(name="lr.0", value=rate),
            severity=Severity.INFO if self._is_learning(history) else settled(history, self.kind),
        )

    def _is_learning(self, history: History) -> bool:
        """Say whether the loss has fallen well below that of the first step, before any update."""
        first = float(beginning(history, "loss", 1)[0])
        part = LEARNED if len(depth(history).matrices_M) > 1 else LINEAR
        return float(median(history.scalar("loss", AFTER))) < first - part * abs(first)

    def _jumped(self, history: History) -> Iterator[Finding]:
        for group in range(history.groups):
            rate_T = history.scalar(f"lr.{group}", SPAN_OF_JUMP)
            at = last_jump(rate_T, self.jump) or 0
            if not AFTER <= at <= len(rate_T) - AFTER or self._had(history, group, rate_T[at]):
                continue
            highest = float(np.fmax.reduce(rate_T[:at]))
            loss_T = history.scalar("loss", SPAN_OF_JUMP)
            before, after = float(median(loss_T[max(0, at - AFTER) : at])), float(median(loss_T[at + 1 :]))
            if after <= self.worse * before:
                continue
            yield self._finding(
                history,
                f"the learning rate rose {factor(rate_T[at] / highest)} times, and the loss with it",
                Quantity(name="jump at step", value=float(history.run.steps(SPAN_OF_JUMP)[at])),
                Quantity(name=f"lr.{group} before", value=highest),
                Quantity(name=f"lr.{group} after", value=float(rate_T[at])),
                Quantity(name="loss before", value=before),
                Quantity(name="loss after", value=after),
                severity=Severity.WARNING,
            )
            return

    def _outgrown(self, history: History) -> Iterator[Finding]:
        """Yield a finding where the rate rises step by step, and the loss since it was lowest with it."""
        rate_T, loss_T = history.scalar("lr.0", SPAN_OF_JUMP), history.scalar("loss", SPAN_OF_JUMP)
        if len(loss_T) < 4 * AFTER:
            return
        rate_B, loss_B = block_medians(rate_T, AFTER), block_medians(loss_T, AFTER)
        best = int(np.argmin(loss_B[:-2]))
        rate, low, usual = float(rate_T[-1]), float(loss_B[best]), float(rate_B[best])
        has_risen = rate_B[-1] >= self.jump * usual > 0
        if not loss_B[-2:].min() >= self.worse * low > 0 or not has_risen or self._had(history, 0, rate):
            return
        ratio_TM = history.param.window("update.ratio", SPAN_OF_JUMP)[:, depth(history).matrices_M]
        ratio = float(np.fmax.reduce(median(ratio_TM.T)))
        if not ratio >= self.large:
            return
        yield self._finding(
            history,
            f"the learning rate has risen {factor(rate / usual)} times since the loss was lowest, and the loss with it",
            Quantity(name="lr.0", value=rate),
            Quantity(name="lr.0 where the loss was lowest", value=usual),
            Quantity(name="lowest loss, median of 6", value=low),
            Quantity(name="loss, median of 6", value=float(loss_B[-1])),
            Quantity(name="update.ratio, median, largest of 64 steps", value=ratio),
        )

    def _had(self, history: History, group: int, rate: float) -> bool:
        """Say whether the rate was nearly as high in the part of the run that the window does not show."""
        earlier_T = history[f"lr.{group}"][:-SPAN_OF_JUMP]
        return len(earlier_T) > 0 and rate < self.jump * float(np.fmax.reduce(earlier_T))

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, that stay quiet, and near misses."""
        large = Synthetic(steps=60, lr=0.1)
        large.weight_l2_TL *= 1 + 0.2 * large.t_T[:, None]
        yield Example("the weights are several times larger after twenty steps", large.history(), (None,))
        yield Example("the rate jumps tenfold, and the loss after it", _jump(factor=10, loss=4), (None,))
        yield Example(
            "updates are a fifth of the weights, and the loss is far above its start", _above(lr=20.0), (None,)
        )
        yield Example("the loss is far above its start, as values in Q-learning are", _above(lr=0.001))
        yield Example("the loss climbs from the first update on", _running_away(lr=100.0), (None,))
        yield Example("it climbs by what the data become, while updates are small", _running_away(lr=1e-4))
        glitch = Synthetic(steps=90)
        glitch.lr_T[60], glitch.loss_T[61:] = 1.0, 4 * glitch.loss_T[61:]
        yield Example("the rate is a thousandfold for one step", glitch.history(), (None,))
        yield Example("the rate rises and rises, and the loss with it", _rising(lr=20.0), (None,))
        yield Example("it does so while updates are small", _rising(lr=0.001))
        yield Example("one update is larger than the weights", _overwritten(), (None,))
        yield Example("a healthy run", Synthetic(steps=60).history())
        linear = Synthetic(steps=60, lr=0.1)
        linear.weight_l2_TL *= 1 + 0.2 * linear.t_T[:, None]
        linear.loss_T[1:] *= 0.5
        yield Example("the weights of a linear model grow, and it learns", linear.history(), (None,))
        long = Synthetic(steps=300)
        long.lr_T = 0.001 * (1 + 9 * (long.t_T % 150 < 20))
        long.loss_T[150:] *= 4
        yield Example("a restart to a rate that it had long ago", long.history())
        slow = Synthetic(steps=200)
        slow.weight_l2_TL *= 1 + 0.02 * slow.t_T[:, None]
        yield Example("weights grow over the whole run", slow.history())
        yield Example("the rate jumps, and the loss goes on falling", _jump(factor=10, loss=1))
        yield Example("a restart to a rate that it has had", _jump(factor=10, loss=4, first=0.01))


def _is_first(history: History, finding: Finding) -> bool:
    """Say whether no other kind was found before, at warning or above."""
    others = (f for f in history.findings if f.kind != finding.kind and f.severity >= Severity.WARNING)
    return all(f.step >= finding.step for f in others)


def _best(history: History) -> float:
    """Return the lowest loss of the run, as median over `AFTER` steps."""
    loss_T = history["loss"]
    return float(np.fmin.reduce(block_medians(loss_T, AFTER))) if len(loss_T) >= AFTER else math.nan


def _jump(*, factor: float, loss: float, first: float = 0.001) -> History:
    made = Synthetic(steps=90)
    made.lr_T[:40], made.lr_T[40:60], made.lr_T[60:] = first, 0.001, 0.001 * factor
    made.loss_T[60:] *= loss
    return made.history()


def _rising(*, lr: float) -> History:
    made = Synthetic(steps=120, optimizer="SGD", lr=lr)
    made.lr_T *= 1 + made.t_T
    made.loss_T[40:] *= 4
    return made.history()


def _above(*, lr: float) -> History:
    made = Synthetic(steps=60, optimizer="SGD", lr=lr)
    made.loss_T[1:] = 40 * made.loss_T[0] * np.exp(made.rng.standard_normal(59))
    return made.history()


def _running_away(*, lr: float) -> History:
    made = Synthetic(steps=12, optimizer="SGD", lr=lr)
    made.loss_T[:] = 2.3 * 4.0**made.t_T
    return made.history()


def _overwritten() -> History:
    made = Synthetic(steps=1)
    made.update_factor_TL[:] = 1e4
    return made.history()


def _update_ratio(history: History) -> float:
    """Return the median update/weight ratio of the weight matrices."""
    return float(median(history.param.newest("update.ratio")[depth(history).matrices_M]))
