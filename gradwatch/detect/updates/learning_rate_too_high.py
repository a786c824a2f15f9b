"""Find updates so large that the weights lose their content, or a rate jump that raises the loss (GW302)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, final

import numpy as np

from gradwatch.detect import Example, interval
from gradwatch.detect.features.baseline import newest_loss
from gradwatch.detect.features.consequences import severity_after
from gradwatch.detect.features.events import is_policy_gradient
from gradwatch.detect.features.finding import Sign, finding_of
from gradwatch.detect.features.lr_schedule import JUMP_WINDOW_STEPS
from gradwatch.detect.features.structure import structure_of
from gradwatch.detect.updates.learning_rate_too_high_rules.compounding_rate import find_compounding_rate
from gradwatch.detect.updates.learning_rate_too_high_rules.diverging_loss import find_diverging_loss
from gradwatch.detect.updates.learning_rate_too_high_rules.examples import (
    make_compounding,
    make_ignored,
    make_jump,
    make_late_clipping,
    make_overwritten,
    make_own_rate,
    make_restarting,
    make_running_away,
    make_thrown,
)
from gradwatch.detect.updates.learning_rate_too_high_rules.ignored_settings import find_ignored_settings
from gradwatch.detect.updates.learning_rate_too_high_rules.late_clipping import find_late_clipping
from gradwatch.detect.updates.learning_rate_too_high_rules.lost_progress import (
    MEDIAN_STEPS,
    NON_FINITE,
    best_loss,
    is_learning,
    is_lost,
)
from gradwatch.detect.updates.learning_rate_too_high_rules.overshot_loss import find_overshot_loss
from gradwatch.detect.updates.learning_rate_too_high_rules.overwritten_matrix import find_overwritten_matrix
from gradwatch.detect.updates.learning_rate_too_high_rules.overwritten_weights import find_overwritten_weights
from gradwatch.detect.updates.learning_rate_too_high_rules.rate_jump import find_rate_jump
from gradwatch.detect.updates.learning_rate_too_high_rules.weight_growth import WINDOW_STEPS as GROWTH_STEPS
from gradwatch.detect.updates.learning_rate_too_high_rules.weight_growth import find_weight_growth
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Finding, Quantity, Severity


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRateTooHigh:
    """Updates that are too large for the weights.

    What it measures: the size of updates relative to the weights, the growth of the weights, and a loss that rises with
    the learning rate.

    Why it matters: beyond a rate of 2 / curvature, each step lands further from the minimum than it started.

    Example: `torch.optim.AdamW(model.parameters(), lr=0.5)`.

    What to do: try a tenth of the learning rate first. Warm up over the first few hundred steps. Clip gradients.

    When it is wrong: weights initialized near zero on purpose, and linear models with well-separated classes, grow by
    large factors. Warm restarts do not count.

    How it is detected: (1) An update/weight ratio of `ratio`, as the median over the weight matrices. An update as
    large as its weights replaces them. (2) Growth of the norms of the weight matrices over the last 20 steps, as the
    median over matrices. If a few updates make weights several times larger, their initialization or what they had
    learned is gone. (3) A learning rate that jumps by `jump` above all its earlier values, and a higher loss after the
    jump. (4) A loss that diverges within the first 20 steps. It has risen at each of the last `rising` steps, or of
    those before it stopped being finite, and is `runaway` times the first; the first update of some matrix was `large`.
    (5) A rate that compounds, by one factor again and again, and is `compound` times the rate at which `learned` of the
    loss was learned. Over the newest 64 steps the loss no longer falls. It is reported before it does harm. (6) A loss
    of `runaway` times the first, as the median over 8 steps, after updates of `large`, at any time of the run. (7) An
    update of `ratio` of one matrix, `lead` times the update of the median matrix. Matrices that began near zero do not
    count, nor those that a normalization follows. (8) In the first updates, torch's functions clip the gradients after
    `optimizer.step()` and not before, and then they are cleared, so that nothing limits the updates. (9) An attribute
    that torch does not read: `param.require_grad = False` or `module.requires_grad = False`, while these tensors train,
    or `optimizer.lr` below the rate in use.

    These signs are not a consequence of numbers that later stop being finite. The finding is critical if nothing else
    was found before it and the run has lost what it had learned. That is so if the run is non-finite, or if the loss,
    as the median over 6 steps, is `lost` times its lowest and no lower than at the start.

    Exceptions to the rules: weights that are initialized near zero on purpose grow by large factors. Such matrices
    count from the size of the default initialization on, and not at all below 5 % of the usual. A linear model with
    well-separated classes needs large weights. Growth does no harm (info) if `learned` of the first loss is gone, or
    `learned_linear` in a linear model. The loss of a policy gradient does not count: it falls and rises with the
    advantages, whatever the agent earns. A restart to a rate that the run has had before is not a jump.

    Source: Bottou et al. 2018, sec. 4, https://arxiv.org/abs/1606.04838; Goyal et al. 2017 on warm-up, sec. 2.2,
    https://arxiv.org/abs/1706.02677.

    Args:
        every: Steps between two calls. 5: half of the steps between two measurements of the weights.
        ratio: Update/weight ratio at which to report. 1: an update as large as its weights replaces them.
        growth: Growth of the weights within 20 steps, in powers of ten. 0.5: 3.2 times.
        jump: Rise of the learning rate above its earlier values. 3: milestones fall, and warm-ups rise in small steps.
        compound: Growth of the rate since the run had learned at it, for (5). 10: good rates span less than that.
        large: Update/weight ratio of the first update, for (4), or of the median matrix, for (6). 0.05: fifty times the
            1e-3 that rates are chosen for.
        runaway: Loss in units of the first for (4) and (6). 100: a start without warm-up overshoots by tens, and
            recovers; the loss of an agent that learns values came to 16.
        lead: Update of a matrix, in units of the median over matrices, for (7). 10: the layers of healthy scripts
            differed by as much, but none of 259 replaced a matrix that began at its usual size.
        matrices: Least number of weight matrices for (7). 3: one of two is half of the model.
        worse: Loss after the jump in units of the loss before it. 1.5: single batches seldom differ that much, and
            medians of 6 never did.
        lost: Loss in units of its best at which all progress is gone. 3: noise moves a median of 6 by less than
            `worse`, the best one down and the newest one up: 2.25.
        harm: Median loss after the update of (1), in units of the loss before it, from which the update did harm. 1.05:
            if nothing has been learned yet, as at a cold start of embeddings, losses of batches differ by 1 %.
        harm_steps: Steps after the update of (1) that this median needs. 3: a single loss is noisy.
        harm_alone: Size of the update of (1), in units of `ratio`, that does harm whatever the loss does. 10: next to
            nothing of the weights is left.
        learned: Part of the first loss, 0..1, that must be gone for the run to have learned, for (2) and (5). 0.5:
            predicting the mean of the targets removes 1/3.
        learned_linear: As `learned`, for (2) in a model of one matrix. 0.1: its initial weights hold nothing worth
            keeping.
        rising: Steps in a row in which the loss of (4) must rise. 4: noise does so once in 120 times.
        compound_half: Part of the growth of the rate, on a log scale, in the newer half of the steps of (5), at least.
            0.45: a rate that compounds has half of it, and a linear warm-up from a third of the rate has 0.37.
        limited: Factor of the clipping of (8) up to which it would have limited an update. 0.9: a limit that takes less
            away is not missed.
        compound_fall: Fall of the loss from one half of the steps of (5) to the other, as a fraction, that shows a rate
            which still helps. 0.03: a smaller change of a median is noise.
    """

    code: ClassVar[str] = "GW302"
    kind: ClassVar[str] = "learning-rate-too-high"
    every: int = 5
    ratio: float = 1.0
    growth: float = 0.5
    jump: float = 3.0
    compound: float = 10.0
    large: float = 0.05
    runaway: float = 100.0
    lead: float = 10.0
    matrices: int = 3
    worse: float = 1.5
    lost: float = 3.0
    harm: float = 1.05
    harm_steps: int = 3
    harm_alone: float = 10.0
    learned: float = 0.5
    learned_linear: float = 0.1
    rising: int = 4
    compound_half: float = 0.45
    limited: float = 0.9
    compound_fall: float = 0.03

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding for the run, and raise an earlier one to critical if the run has lost its progress since."""
        earlier = [f for f in history.findings if f.kind == self.kind and f.severity == Severity.WARNING]
        for finding in (*earlier, *self._find(history)):
            if finding.severity == Severity.WARNING and _is_first(history, finding):
                yield self._critical(history, finding) if is_lost(history, lost=self.lost) else finding
            else:
                yield finding

    def _find(self, history: History) -> Iterator[Finding]:
        yield from self._report(history, find_late_clipping(history, limited=self.limited), Severity.WARNING)
        for sign in find_ignored_settings(history):
            yield from self._report(history, sign, Severity.WARNING)
        rate_T = history.scalar("lr.0", JUMP_WINDOW_STEPS)
        # cheap: without such a spread the rate has neither jumped nor risen
        if np.fmax.reduce(rate_T) >= self.jump * np.fmin.reduce(rate_T):
            yield from self._report(
                history, find_rate_jump(history, jump=self.jump, worse=self.worse), Severity.WARNING
            )
            compounding = find_compounding_rate(
                history,
                compound=self.compound,
                learned=self.learned,
                half=self.compound_half,
                fall=self.compound_fall,
            )
            yield from self._report(history, compounding)
        # the jump comes first: it names the step at fault
        diverging = find_diverging_loss(history, runaway=self.runaway, large=self.large, rising=self.rising)
        yield from self._report(history, diverging)
        # the rules below compare updates with weights
        if not len(structure_of(history).rate_weights.indices_W):
            return
        overwritten = find_overwritten_weights(
            history,
            ratio=self.ratio,
            every=interval(self.every, history.step),
            harm=self.harm,
            harm_steps=self.harm_steps,
            harm_alone=self.harm_alone,
        )
        yield from self._report(history, overwritten)
        if not overwritten:
            every = interval(self.every, history.step)
            for sign in find_overwritten_matrix(
                history, ratio=self.ratio, every=every, lead=self.lead, matrices=self.matrices
            ):
                yield from self._report(history, sign)
        yield from self._report(history, find_overshot_loss(history, runaway=self.runaway, large=self.large))
        # weights may grow while the loss falls, which does no harm; that of a policy falls without success
        grown = find_weight_growth(history, growth=self.growth, every=self.every)
        is_useful = (
            grown
            and not is_policy_gradient(history)
            and is_learning(history, learned=self.learned, learned_linear=self.learned_linear)
        )
        severity = Severity.INFO if is_useful else None
        yield from self._report(history, grown, severity, onset=int(history.param.steps(GROWTH_STEPS + 1)[0]))

    def _report(
        self, history: History, sign: Sign | None, severity: Severity | None = None, *, onset: int | None = None
    ) -> Iterator[Finding]:
        """Yield the finding of a sign, if there is one, at the severity that earlier findings leave by default."""
        if sign is not None:
            severity = severity_after(history, self.kind, but=_later(history, sign)) if severity is None else severity
            since = sign.since if onset is None else onset
            yield finding_of(
                self, history, sign.message, *sign.evidence, layer=sign.layer, severity=severity, onset=since
            )

    def _critical(self, history: History, finding: Finding) -> Finding:
        newest = Quantity(key="loss", value=newest_loss(history, MEDIAN_STEPS))
        best = Quantity(key="loss.best", label="best loss", value=best_loss(history))
        message = f"{finding.message}; the model is back at its initial loss"
        return replace(finding, severity=Severity.CRITICAL, message=message, evidence=(*finding.evidence, newest, best))

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, that stay quiet, and near misses."""
        large = Synthetic(steps=60, lr=0.1)
        large.weight_l2_TL *= 1 + 0.2 * large.t_T[:, None]
        yield Example("the weights are several times larger after twenty steps", large.history(), (None,))
        yield Example("the rate jumps tenfold, and the loss after it", make_jump(loss=4), (None,))
        yield Example("the loss climbs from the first update on", make_running_away(lr=100.0), (None,))
        yield Example(
            "the loss climbs from the first update on, to infinity",
            make_running_away(lr=100.0, steps=16, finite=6),
            (None,),
        )
        yield Example("the loss climbs because the data change, while updates are small", make_running_away(lr=1e-4))
        yield Example("the loss is thrown up after a warm-up, and comes back", make_thrown(height=400), (None,))
        yield Example("a curriculum throws the loss up by less", make_thrown(height=40))
        yield Example("single batches are a thousand times as hard", make_thrown(height=400, every=5))
        glitch = Synthetic(steps=90)
        glitch.lr_T[60], glitch.loss_T[61:] = 1.0, 4 * glitch.loss_T[61:]
        yield Example("the rate is a thousand times as high for one step", glitch.history(), (None,))
        yield Example("the rate grows by 4 % at every step, with no end", make_compounding(), (None,))
        yield Example("the rate compounds in an exponential warm-up, and the loss falls", make_compounding(falls=True))
        yield Example("the rate grows by equal amounts, as in a linear warm-up", make_compounding(linear=True))
        yield Example("the rate returns to where it was before it fell, as in a warm restart", make_restarting())
        yield Example("one update is larger than the weights", make_overwritten(), (None,))
        yield Example("one layer has a thousand times the rate of the others", *make_own_rate(factor=1e3))
        yield Example("one layer has ten times the rate of the others", make_own_rate(factor=10.0)[0])
        yield Example(
            "a layer with ten times the rate began at zero, as an adapter does",
            make_own_rate(factor=1e3, first=1e-3)[0],
        )
        yield Example("the gradients are clipped after the update", make_late_clipping(factor=0.2), (None,))
        yield Example("clipping after the update only takes the norm", make_late_clipping(factor=1))
        yield Example("weights are frozen by a misspelled attribute", make_ignored(), ("layers.0.weight",))
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
        yield Example("the rate jumps, and the loss keeps falling", make_jump(loss=1))
        yield Example("a restart to a rate that it has had", make_jump(loss=4, first=0.01))


def _later(history: History, sign: Sign) -> frozenset[str]:
    """Return `non-finite` as a kind that explains nothing, unless it was found before the sign began."""
    is_before = any(f.kind == NON_FINITE and (sign.since is None or f.step <= sign.since) for f in history.findings)
    return frozenset() if is_before else frozenset({NON_FINITE})


def _is_first(history: History, finding: Finding) -> bool:
    """Return whether no other kind was found earlier, at warning or above."""
    others = (f for f in history.findings if f.kind != finding.kind and f.severity >= Severity.WARNING)
    return all(f.step >= finding.step for f in others)
