"""GW302: updates so large that the weights lose what they were, or a jump of the rate that the loss answers."""

# W = weight matrices and kernels, or steps of a window before each, D = steps that are looked at

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, final

import numpy as np
from numpy.typing import NDArray

from gradwatch.detect import Example
from gradwatch.detect.features.baseline import first_steps
from gradwatch.detect.features.consequences import severity_after
from gradwatch.detect.features.finding import Sign, finding_of
from gradwatch.detect.features.lr_schedule import JUMP_WINDOW_STEPS
from gradwatch.detect.features.robust_stats import block_medians, median
from gradwatch.detect.features.structure import structure_of
from gradwatch.detect.updates._large_updates import SPAN, grown, overshot, ran_away, replaced
from gradwatch.detect.updates._rising_rate import AFTER, jumped, outgrown
from gradwatch.history.lookahead import Ahead
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Finding, Quantity, Severity

NON_FINITE = "non-finite"
"""Kind of numbers that are none any more, which a rate that is too high makes of them."""

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
    20 steps, a loss that has risen at each of the last 4, or of those before it ceased to be finite, and is `runaway`
    times the first, where the first update of some matrix was `large`. What is seen before numbers cease to be finite
    does not follow from that. It is critical, where nothing else was found before it, once what was learned is lost:
    the run is non-finite, or the loss, as median over 6 steps, is `lost` times the lowest that it was and no lower than
    in the beginning.

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
        history, weights_W = ahead.history, structure_of(ahead.history).rate_weights.indices_W
        was_found = any(f.kind == self.kind and f.severity == Severity.WARNING for f in history.findings)
        if was_found:
            return np.zeros(len(ahead), np.bool_)
        rate_DW = ahead.scalars("lr.0", JUMP_WINDOW_STEPS)
        may_D = np.fmax.reduce(rate_DW, axis=1) >= self.jump * np.fmin.reduce(rate_DW, axis=1)
        may_D |= ahead.steps_D < SPAN
        if len(weights_W):
            has_begun = len(history.run.steps(1)) > 0
            first = first_steps(history, "loss", 1)[0] if has_begun else history.run.ahead("loss")[0, 0]
            may_D |= ahead.scalar("loss") > self.above_start * first
            may_D |= ahead.windows("weight.l2", 1, int(weights_W[0]))[:, 0] >= 0
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
        rate_T = history.scalar("lr.0", JUMP_WINDOW_STEPS)
        if np.fmax.reduce(rate_T) >= self.jump * np.fmin.reduce(rate_T):
            yield from self._told(history, jumped(history, jump=self.jump, worse=self.worse), Severity.WARNING)
            yield from self._told(history, outgrown(history, jump=self.jump, worse=self.worse, large=self.large))
        if history.step < SPAN:
            yield from self._told(history, ran_away(history, runaway=self.runaway, large=self.large))
        weights_W = structure_of(history).rate_weights.indices_W
        if not len(weights_W):
            return
        if np.fmax.reduce(history.param.window("update.ratio", self.every + 1), axis=None) >= self.ratio:
            yield from self._told(history, replaced(history, ratio=self.ratio, every=self.every))
        if history.run.newest("loss")[0] > self.above_start * first_steps(history, "loss", 1)[0] > 0:
            yield from self._told(history, overshot(history, above_start=self.above_start, large=self.large))
        if history.step >= self.every and history.param.newest("weight.l2")[weights_W[0]] >= 0:  # nan is not
            severity = Severity.INFO if self._is_learning(history) else None
            yield from self._told(history, grown(history, growth=self.growth), severity)

    def _told(self, history: History, sign: Sign | None, severity: Severity | None = None) -> Iterator[Finding]:
        """Yield the finding of a sign, where there is one, by default as grave as it is by itself."""
        if sign is not None:
            severity = severity_after(history, self.kind, but=_later(history, sign)) if severity is None else severity
            yield finding_of(self, history, sign.message, *sign.evidence, severity=severity)

    def _critical(self, history: History, finding: Finding) -> Finding:
        newest = Quantity(key="loss", value=float(median(history.scalar("loss", AFTER))))
        best = Quantity(key="loss.best", label="best loss", value=_best(history))
        message = f"{finding.message}; what was learned is lost"
        return replace(finding, severity=Severity.CRITICAL, message=message, evidence=(*finding.evidence, newest, best))

    def _is_lost(self, history: History) -> bool:
        """Say whether the run has become non-finite, or its loss is far above its best and as high as it began."""
        if any(f.kind == NON_FINITE and f.severity == Severity.CRITICAL for f in history.findings):
            return True
        first, newest = float(median(first_steps(history, "loss", AFTER))), float(median(history.scalar("loss", AFTER)))
        return newest >= first > 0 and newest >= self.lost * _best(history) > 0

    def _is_learning(self, history: History) -> bool:
        """Say whether the loss has fallen well below that of the first step, before any update."""
        first = float(first_steps(history, "loss", 1)[0])
        part = LEARNED if len(structure_of(history).matrices.indices_M) > 1 else LINEAR
        return float(median(history.scalar("loss", AFTER))) < first - part * abs(first)

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
        yield Example("so they are in a model of embeddings", _above(lr=20.0, module_type="Embedding"), (None,))
        yield Example("the loss is far above its start, as values in Q-learning are", _above(lr=0.001))
        yield Example("the loss climbs from the first update on", _running_away(lr=100.0), (None,))
        yield Example("it climbs from there to infinity", _running_away(lr=100.0, steps=16, finite=6), (None,))
        yield Example("it climbs by what the data become, while updates are small", _running_away(lr=1e-4))
        glitch = Synthetic(steps=90)
        glitch.lr_T[60], glitch.loss_T[61:] = 1.0, 4 * glitch.loss_T[61:]
        yield Example("the rate is a thousandfold for one step", glitch.history(), (None,))
        yield Example("the rate rises and rises, and the loss with it", _rising(lr=20.0), (None,))
        yield Example("it does so while updates are small", _rising(lr=0.001))
        yield Example("it goes back to where it was before it fell, as warm restarts do", _restarting())
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


def _later(history: History, sign: Sign) -> frozenset[str]:
    """Return the kind of numbers that ceased to be finite, where that was found after the sign had begun."""
    is_before = any(f.kind == NON_FINITE and (sign.since is None or f.step <= sign.since) for f in history.findings)
    return frozenset() if is_before else frozenset({NON_FINITE})


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


def _restarting() -> History:
    made = Synthetic(steps=62, optimizer="SGD", lr=20.0)
    made.lr_T[:40] *= 1 - 0.95 * made.t_T[:40] / 40
    made.loss_T[40:] *= 4
    return made.history()


def _above(*, lr: float, module_type: str = "Linear") -> History:
    made = Synthetic(steps=60, optimizer="SGD", lr=lr)
    made.info = replace(made.info, layers=tuple(replace(i, module_type=module_type) for i in made.info.layers))
    made.loss_T[1:] = 40 * made.loss_T[0] * np.exp(made.rng.standard_normal(59))
    return made.history()


def _running_away(*, lr: float, steps: int = 12, finite: int = 12) -> History:
    made = Synthetic(steps=steps, optimizer="SGD", lr=lr)
    made.loss_T[:] = 2.3 * 4.0**made.t_T
    made.loss_T[finite:] = np.inf
    return made.history()


def _overwritten() -> History:
    made = Synthetic(steps=1)
    made.update_factor_TL[:] = 1e4
    return made.history()
