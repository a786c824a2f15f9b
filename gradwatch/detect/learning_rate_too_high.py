"""GW302: updates so large that the weights lose what they were, or a jump of the rate that the loss answers."""

# T = steps of a window, M = weight matrices and kernels

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from gradwatch.detect import Example
from gradwatch.detect._depth import depth
from gradwatch.detect._robust import log10, median
from gradwatch.history.store import History
from gradwatch.history.synthetic import Synthetic
from gradwatch.records import Finding, Quantity, Severity

SPAN = 20
"""Steps over which growth is measured: two samples of the weights at the default schedule."""

AFTER = 6
"""Steps before and after a jump of the rate that show what the loss does. (The start of a warm-up is no jump.)"""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRateTooHigh:
    """Updates that are too large for the weights they move.

    What it measures: two things. (1) How much the norms of the weight matrices have grown over the last 20 steps, as
    the median over matrices: where a few updates make weights several times larger, what they were drawn as or had
    learned is gone. (2) A learning rate that rises beyond all that it was before, by `jump`, and a loss that is higher
    after it than before.

    Why it matters: beyond 2 / curvature each step overshoots the valley by more than it came from.

    When it is wrong: weights drawn near zero on purpose grow by many times; such matrices are left out as long as they
    are below a twentieth of the usual size. A restart to a rate that the run has had before is no jump.

    What to do: a tenth of the rate is the first thing to try; warm up over the first few hundred steps; clip.

    Source: Bottou et al. 2018, sec. 4, https://arxiv.org/abs/1606.04838; Goyal et al. 2017 on warm-up, sec. 2.2,
    https://arxiv.org/abs/1706.02677.

    Args:
        every: Steps between two looks. 10: weights are measured that often.
        growth: Growth of the weights within 20 steps, in powers of ten. 0.5: 3.2 times; 600 healthy runs reached 0.38,
            which was a fresh linear head on good features.
        jump: Rise of the learning rate over its largest value before, as a factor. 3: milestones fall, warm-ups
            rise in small steps.
        worse: Loss after the jump in units of that before. 1.5: a batch is noisier than that seldom, the median of 6
            never was.
    """

    code: ClassVar[str] = "GW302"
    kind: ClassVar[str] = "learning-rate-too-high"
    every: int = 10
    growth: float = 0.5
    jump: float = 3.0
    worse: float = 1.5

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding for the run."""
        rate_T = history.scalar("lr.0", 64)
        if rate_T[-1] >= self.jump * np.fmin.reduce(rate_T):
            yield from self._jumped(history)
        newest_L = history.param.newest("weight.l2")
        matrices_M = depth(history).matrices_M
        if history.step < self.every or not len(matrices_M) or np.isnan(newest_L[matrices_M[0]]):
            return
        yield from self._grown(history)

    def _grown(self, history: History) -> Iterator[Finding]:
        shape = depth(history)
        norm_TL = history.param.window("weight.l2", SPAN + 1)
        at = 0 if norm_TL[0, shape.matrices_M[0]] >= 0 else int(np.argmax(~np.isnan(norm_TL).all(axis=1)))
        first_M, last_M = norm_TL[at, shape.matrices_M], norm_TL[-1, shape.matrices_M]
        if 2 * np.count_nonzero(last_M > 10**self.growth * first_M) < len(first_M):
            return
        gain_M = first_M / shape.root_fan_out_M  # near 1 for weights that keep the size of the signal
        growth = float(median(np.where(gain_M > 0.05, log10(last_M) - log10(first_M), np.nan)))
        if not growth >= self.growth:
            return
        rate = float(history.run.newest("lr.0")[0])
        yield Finding(
            code=self.code,
            kind=self.kind,
            layer=None,
            step=history.step,
            severity=Severity.WARNING,
            message=f"the weights have grown {10**growth:.1f} times within {SPAN} steps at a learning rate of {rate:g}",
            evidence=(
                Quantity(name="growth of weight.l2, median", value=growth, unit="decades"),
                Quantity(name="update.ratio, median", value=_update_ratio(history)),
                Quantity(name="lr.0", value=rate),
            ),
        )

    def _jumped(self, history: History) -> Iterator[Finding]:
        for group in range(history.groups):
            rate_T = history.scalar(f"lr.{group}", 64)
            before_T = np.maximum.accumulate(rate_T)[:-1]
            jumps = np.flatnonzero(rate_T[1:] >= self.jump * before_T) + 1
            at = int(jumps[-1]) if len(jumps) else 0
            if not AFTER <= at <= len(rate_T) - AFTER or before_T[at - 1] <= 0:
                continue
            loss_T = history.scalar("loss", 64)
            before, after = float(median(loss_T[max(0, at - AFTER) : at])), float(median(loss_T[at + 1 :]))
            if after <= self.worse * before:
                continue
            yield Finding(
                code=self.code,
                kind=self.kind,
                layer=None,
                step=history.step,
                severity=Severity.WARNING,
                message=f"the learning rate rose {rate_T[at] / before_T[at - 1]:.0f} times, and the loss with it",
                evidence=(
                    Quantity(name="jump at step", value=float(history.run.steps(64)[at])),
                    Quantity(name=f"lr.{group} before", value=float(before_T[at - 1])),
                    Quantity(name=f"lr.{group} after", value=float(rate_T[at])),
                    Quantity(name="loss before", value=before),
                    Quantity(name="loss after", value=after),
                ),
            )
            return

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, that stay quiet, and near misses."""
        large = Synthetic(steps=60, lr=0.1)
        large.weight_l2_TL *= 1 + 0.2 * large.t_T[:, None]
        yield Example("the weights are several times larger after twenty steps", large.history(), (None,))
        yield Example("the rate jumps tenfold, and the loss after it", _jump(factor=10, loss=4), (None,))
        yield Example("a healthy run", Synthetic(steps=60).history())
        slow = Synthetic(steps=200)
        slow.weight_l2_TL *= 1 + 0.02 * slow.t_T[:, None]
        yield Example("weights grow over the whole run", slow.history())
        yield Example("the rate jumps, and the loss goes on falling", _jump(factor=10, loss=1))
        yield Example("a restart to a rate that it has had", _jump(factor=10, loss=4, first=0.01))


def _jump(*, factor: float, loss: float, first: float = 0.001) -> History:
    made = Synthetic(steps=90)
    made.lr_T[:40], made.lr_T[40:60], made.lr_T[60:] = first, 0.001, 0.001 * factor
    made.loss_T[60:] *= loss
    return made.history()


def _update_ratio(history: History) -> float:
    """Return the median update/weight ratio of the weight matrices."""
    return float(median(history.param.newest("update.ratio")[depth(history).matrices_M]))
