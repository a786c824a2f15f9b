"""Find updates that are negligible relative to the weights while much of the loss remains (GW303)."""

# T = steps of a window, W = weight matrices and kernels, or embeddings if there are no others

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, final

import numpy as np

from gradwatch.detect import Example, Recovery
from gradwatch.detect.features.baseline import is_learned
from gradwatch.detect.features.finding import findings_of
from gradwatch.detect.features.recovery import start_of_state, tensors_of
from gradwatch.detect.features.robust_stats import median
from gradwatch.detect.features.structure import structure_of
from gradwatch.detect.features.unmade_updates import are_updates_missing
from gradwatch.detect.updates.learning_rate_too_low_rules.negligible_updates import find_negligible_updates
from gradwatch.detect.updates.learning_rate_too_low_rules.slow_groups import find_slow_groups
from gradwatch.detect.updates.learning_rate_too_low_rules.squared_rate import corrected_step, find_squared_rate
from gradwatch.detect.updates.learning_rate_too_low_rules.update_levels import (
    group_levels,
    is_gradient_gone,
    may_learn,
    update_levels,
)
from gradwatch.detect.updates.learning_rate_too_low_rules.warm_up import is_warming_up
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Finding

RECOVERY = 10.0
"""Update/weight ratio, in units of `ratio`, that withdraws a finding: a warm-up that is far too long passes `ratio`."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRateTooLow:
    """Updates that change almost nothing while the loss is still high.

    What it measures: the update/weight ratio of the weight matrices; usual values are near 1e-3.

    Why it matters: at a ratio of 1e-5, ten thousand steps change a weight by at most 10 %.

    Example: `scheduler = ExponentialLR(optimizer, gamma=0.9)` with `scheduler.step()` after every batch instead of
    every epoch.

    What to do: raise the learning rate by factors of 10 until the ratio is near 1e-3. Check whether a schedule meant
    for epochs is stepped for every batch.

    When it is wrong: a trained model that is only fine-tuned; a noisy problem whose loss cannot fall further. If only
    some layers hardly change, see vanishing-gradient and dead-layer.

    When it is withdrawn: the updates were above ten times `ratio` in `samples` samples in a row, or less than `left` of
    the loss is left.

    How it is detected: the update/weight ratio of the weight matrices. The median must be below `ratio`, and the
    largest below ten times `ratio`, in `samples` samples in a row. Matrices that began near zero do not count. The
    learning rate must not be rising. It may rise so slowly in a straight line that the ratio needs more than `horizon`
    further steps, or more than are planned (`total_steps`), to reach ten times `ratio`. The loss must still be a good
    part of the first. If the ratio was larger before, it must have been low for a third of the run: the end of a
    schedule takes 1/50 (cosine) to 1/4 (milestones) of a run. A model of embeddings alone is judged by the rows that a
    batch looked up, because a table moves less than its rows, by the root of their share. Layers of a group whose rate
    is 1e-4 of another's are judged by themselves. A schedule whose largest rate is the square of the rate that the
    optimizer was given returns rates where `LambdaLR` expects factors. Nothing is reported if an update is 1e-3 of the
    first at the same rate: then the gradient is gone.

    Source: LeCun et al. 1998, "Efficient BackProp", sec. 4.7; Karpathy, CS231n, "Ratio of weights:updates",
    https://cs231n.github.io/neural-networks-3/#ratio.

    Args:
        every: Steps between two calls. 10: updates are measured that often.
        ratio: Update/weight ratio up to which an update is negligible. 1e-5: a hundredth of the usual 1e-3; careful
            fine-tuning was at 2e-4.
        samples: Samples in a row. 3: twenty steps at the default schedule.
        left: Loss, in units of the first 8 steps' loss, above which there is something left to learn. 0.1: runs at
            the end of their schedule were below, except for noisy problems.
        horizon: Steps that a warm-up may still need to reach a useful ratio. 2000: the longest warm-ups in use, 10000
            steps to the usual 1e-3, reach it after a tenth of them.
    """

    code: ClassVar[str] = "GW303"
    kind: ClassVar[str] = "learning-rate-too-low"
    every: int = 10
    ratio: float = 1e-5
    samples: int = 3
    left: float = 0.1
    horizon: int = 2000

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding for the run, or for an optimizer group with a far lower rate than the other groups."""
        yield from findings_of(self, history, [find_squared_rate(history, left=self.left)])
        yield from find_slow_groups(self, history, ratio=self.ratio, samples=self.samples, left=self.left)
        newest_W = history.param.newest("update.ratio")[structure_of(history).rate_weights.indices_W]
        # cheap: the newest updates must be small enough
        if not np.fmin.reduce(newest_W, initial=np.inf) < self.ratio or not float(median(newest_W)) < self.ratio:
            return
        level_T = update_levels(history)
        steps_T = history.param.steps()[~np.isnan(level_T)]
        level_T = level_T[~np.isnan(level_T)]
        if len(level_T) < self.samples:
            return
        newest = float(level_T[-1])
        # the rate is not at fault if no update is made: `not-optimized` reports it
        if not newest and are_updates_missing(history, samples=self.samples):
            return
        # a rate that still rises will be large enough in time
        if is_warming_up(history, newest, ratio=self.ratio, horizon=self.horizon):
            return
        if not may_learn(history) or is_gradient_gone(history, newest):
            return
        still = find_negligible_updates(
            history, steps_T, level_T, ratio=self.ratio, samples=self.samples, left=self.left
        )
        yield from findings_of(self, history, [still])

    def recovery(self, history: History, finding: Finding) -> Recovery | None:
        """Return the step from which the updates have been larger, or the loss is nearly gone."""
        if is_learned(history, left=self.left):
            return Recovery(history.step, f"less than {100 * self.left:.3g} % of the loss was left")
        initial = next((q.value for q in finding.evidence if q.key == "lr.initial"), None)
        if initial is not None:
            end = corrected_step(history, initial)
            return None if end is None else Recovery(end, "the learning rate rose above the square of the optimizer's")
        # a single large update is no recovery
        level_T = group_levels(history, tensors_of(history, finding)) if finding.names else update_levels(history)
        is_known_T = ~np.isnan(level_T)
        steps_T, level_T = history.param.steps()[is_known_T], level_T[is_known_T]
        end = start_of_state(level_T >= RECOVERY * self.ratio, steps_T, least=self.samples)
        return None if end is None else Recovery(end, f"an update changed the weights by {100 * level_T[-1]:.1g} %")

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, that stay quiet, and near misses."""
        yield Example("a rate of 1e-8 for a network from scratch", _stuck(lr=1e-8), (None,))
        yield Example("a scheduler meant for epochs is stepped per batch", _decayed(over=8.0), (None,))
        yield Example("a rate of 1e-8 for embeddings", _looked_up(lr=1e-8, unread=0.5), (None,))
        yield Example("the function of a LambdaLR returns the rate", _scheduled(peak=3e-3), (None,))
        yield Example("the function of a LambdaLR returns a factor", _scheduled(peak=1.0))
        yield Example("a warm-up passes the square of the rate", _scheduled(peak=1.0, warm_up=500))
        yield Example("embeddings of which a batch reads a row in ten thousand", _looked_up(lr=1e-6, unread=0.9999))
        yield Example(
            "one matrix is of zeros at first, as a token for the class is", _stuck(lr=1e-8, opened=1e6), (None,)
        )
        yield Example("a group has a millionth of the others' rate, by a slip", *_slowed(factor=1e-6))
        yield Example("a group has a hundredth, as in fine-tuning", _slowed(factor=1e-2)[0])
        yield Example("a healthy run", Synthetic(steps=60).history())
        yield Example("a warm-up that would take a hundred thousand steps", _warming(over=1e6), (None,))
        yield Example("a warm-up of ten thousand steps", _warming(over=1e4))
        yield Example("one of ten thousand steps in a run of 150", _warming(over=1e4, planned=150), (None,))
        yield Example("one of ten thousand steps in a run of as many", _warming(over=1e4, planned=10000))
        yield Example("one of ten thousand steps to a rate for fine-tuning", _warming(over=6e4), (None,))
        yield Example("a first step threw it to where there is no gradient", _thrown())
        yield Example("a rate that doubles every 50 steps", _warming(doubling=50.0))
        yield Example("a schedule ends at zero", _decayed(over=150.0))
        learned = Synthetic(steps=120, lr=1e-8)
        learned.loss_T[8:] *= 0.01
        yield Example("there is nothing left to learn", learned.history())
        yield Example("only the first layers hardly move", _vanishing())


def _slowed(*, factor: float) -> tuple[History, tuple[str, ...]]:
    made = Synthetic(steps=60).own_rate(4, factor=factor)
    return made.history(), made.names(4)


def _stuck(*, lr: float, opened: float = 1.0) -> History:
    """Return a run at rate `lr` in which the last matrix starts near zero and moves `opened` times more."""
    made = Synthetic(steps=60, lr=lr)
    made.loss_T[:] = 2.3
    if opened > 1:
        made.weight_l2_TL[:, -1] = 1e-3
        made.update_factor_TL[:, -1] = opened
    return made.history()


def _looked_up(*, lr: float, unread: float) -> History:
    """Return a run with embeddings only, of which each batch leaves a fraction `unread` of the rows unread."""
    made = Synthetic(steps=60, lr=lr)
    made.info = replace(made.info, layers=tuple(replace(i, module_type="Embedding") for i in made.info.layers))
    made.zero_frac_TL[:] = unread
    made.loss_T[:] = 2.3
    return made.history()


def _decayed(*, over: float) -> History:
    """Return a run in which the rate falls tenfold every `over` / 2 steps."""
    made = Synthetic(steps=200)
    made.lr_T *= 10.0 ** (-np.maximum(made.t_T - 200 + 1.1 * over if over > 50 else made.t_T, 0) / over * 2)
    made.loss_T[:] = np.maximum(made.loss_T, 0.8)
    return made.history()


def _warming(*, over: float = 1.0, doubling: float = 0.0, planned: int | None = None) -> History:
    """Return a run in which the rate rises linearly over `over` steps, or doubles every `doubling` steps."""
    made = Synthetic(steps=120)
    made.info = replace(made.info, total_steps=planned)
    made.lr_T = 1e-8 * 2 ** (made.t_T / doubling) if doubling else 1e-3 * (made.t_T + 1) / over
    made.loss_T[:] = 2.3
    return made.history()


def _scheduled(*, peak: float, warm_up: int = 20, initial: float = 3e-3) -> History:
    """Return a run whose schedule multiplies `initial` by a factor that rises to `peak`, and then falls to zero."""
    made = Synthetic(steps=60)
    made.info = replace(made.info, initial_rates=(initial,))
    rising_T, falling_T = np.minimum((made.t_T + 1) / warm_up, 1), 0.5 * (1 + np.cos(np.pi * made.t_T / 160))
    made.lr_T = initial * peak * rising_T * falling_T
    made.loss_T[:] = 2.3
    return made.history()


def _thrown() -> History:
    """Return a run with SGD in which the gradients are gone after the first update."""
    made = Synthetic(steps=60, optimizer="SGD", lr=0.1)
    made.grad_l2_TL[1:] *= 1e-6
    made.loss_T[:] = 2.3
    return made.history()


def _vanishing() -> History:
    made = Synthetic(steps=60, optimizer="SGD", lr=0.1).vanishing(decades=9)
    return made.history()
