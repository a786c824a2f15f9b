"""Find updates that are negligible relative to the weights while much of the loss remains (GW303)."""

# T = steps of a window, W = weight matrices and kernels, or embeddings if there are no others

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from gradwatch.detect import Example, Recovery
from gradwatch.detect.features.baseline import is_learned
from gradwatch.detect.features.finding import Sign, findings_of
from gradwatch.detect.features.recovery import start_of_state, tensors_of
from gradwatch.detect.features.robust_stats import median
from gradwatch.detect.features.structure import structure_of
from gradwatch.detect.features.unmade_updates import are_updates_missing
from gradwatch.detect.updates.learning_rate_too_low_rules.examples import (
    make_decayed,
    make_looked_up,
    make_outweighed,
    make_scheduled,
    make_slow,
    make_slowed,
    make_stuck,
    make_thrown,
    make_vanishing,
    make_warming,
)
from gradwatch.detect.updates.learning_rate_too_low_rules.negligible_updates import find_negligible_updates
from gradwatch.detect.updates.learning_rate_too_low_rules.outweighed_gradients import find_outweighed_gradients
from gradwatch.detect.updates.learning_rate_too_low_rules.short_travel import TRAVEL, find_short_travel, has_fallen
from gradwatch.detect.updates.learning_rate_too_low_rules.slow_groups import find_slow_groups
from gradwatch.detect.updates.learning_rate_too_low_rules.squared_rate import corrected_step, find_squared_rate
from gradwatch.detect.updates.learning_rate_too_low_rules.unfinished_warm_up import find_unfinished_warm_up
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

    When it is wrong: a trained model that is only fine-tuned; a noisy problem with a loss that cannot fall further. If
    only some layers hardly change, see vanishing-gradient and dead-layer.

    When it is withdrawn: the updates were above `useful` times `ratio` in `samples` samples in a row, or less than
    `left` of the loss is left. (4) is never withdrawn.

    How it is detected: (1) The update/weight ratio of the weight matrices. The median must be below `ratio`, and the
    largest below `spread` times `ratio`, in `samples` samples in a row. Matrices that began near zero do not count. The
    learning rate must not be rising. It may rise so slowly in a straight line that the ratio needs more than `horizon`
    further steps, or more than are planned (`total_steps`), to reach `useful` times `ratio`. The loss must still be a
    good part of the first. If the ratio was larger before, it must have been low for one in `schedule_end` of the steps
    of the run. A model of embeddings alone is judged by the rows that a batch looked up, because a table moves less
    than its rows, by the root of their share. Nothing is reported if an update is `gone` of the first at the same rate:
    then the gradient is gone. (2) Layers of a group whose rate is `slow` of another's are judged by themselves. (3) A
    schedule whose largest rate is the square of the rate that the optimizer was given returns rates where `LambdaLR`
    expects factors. (4) The run is finished, and its rate has only risen, and is still far below the optimizer's. (5)
    The first update of Adam, which is as large as its rate whatever the gradients are, was `outweighed` of it: eps is
    larger than the gradients. Updates must be below `useful` times `ratio`. (6) All updates of `travel_steps` steps add
    up to less than `travel`, and the loss has not fallen by `travel_fall`. Most matrices began at one size (`alike`).

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
        spread: Ratio of the largest update/weight ratio to the median up to which all layers move alike, for (1). 10:
            it is larger if gradients vanish.
        gone: Size of an update, over the first at the same rate, below which its gradient is gone. 0.001: while a model
            learns, its gradient falls by tens, and an update of Adagrad falls by the root of the number of steps.
        useful: Update/weight ratio, in units of `ratio`, that a warm-up must reach, and that withdraws a finding. 10: a
            warm-up that is far too long passes `ratio` too.
        speed_up: Slope of the rate in the second half of 32 steps, over its slope in the first half, above which it
            grows ever faster and may soon be large. 1.1: for a straight line both slopes are equal.
        schedule_end: Steps of the run, per step with negligible updates, above which these may be the end of a
            schedule. 3: it takes 1/50 (cosine) to 1/4 (milestones) of a run.
        slow: Rate of a group, over the largest rate, up to which it is a mistake, for (2). 0.0001: fine-tuning uses
            1/100, or 1/200 in steps.
        square_rate: Rate given to the optimizer up to which its square is not an accident, for (3). 0.02: at 0.1, the
            first epoch of a warm-up over ten epochs has a factor of 0.1.
        square_low: Largest rate, over the square, from which it is the square. 0.8: it stays below 1 if a warm-up is
            multiplied by a cosine that falls meanwhile.
        square_high: Largest rate, over the square, up to which it is the square. 1.01: it exceeds 1 by rounding alone.
        square_steps: Steps since the largest rate after which the warm-up is over, for (3). 10: a warm-up
            reaches a new largest rate at nearly every step.
        square_level: Steps at the largest rate after which it is not a stage of a warm-up, for (3). 100: its stages
            are shorter.
        square_end: Rate, over the square, that withdraws a finding of (3). 2: the schedule has been corrected.
        reached: Newest rate, over the one that the optimizer was given, up to which a warm-up was too long, for (4).
            0.5: warm-ups usually take a tenth of a run at most.
        outweighed: First update of Adam, over its rate, up to which eps outweighs the gradients, for (5). 0.1: eps is 9
            times the gradients of the layer that has the largest.
        travel: Sum of the update/weight ratios of all steps below which the weights have hardly moved, for (6). 0.1:
            of 259 healthy scripts from scratch, those that had not learned in 120 steps had moved by 0.5 and more.
        travel_fall: Fall of the loss, as a fraction, below which (6) judges. 0.1: half would take five times as long.
        travel_steps: Least number of steps for (6). 200: updates of 5e-4, half of the usual, add up to `travel`.
        planned: Planned steps of the run per step of waiting for (6). 20: a long run may start slowly for longer.
        alike: Distance of the first sizes of matrices of one rule, as a fraction. 0.1: two of 500 differ by 9 %.
        finished_steps: Steps of a run, at least, for (4). 50: fewer are a trial.
    """

    code: ClassVar[str] = "GW303"
    kind: ClassVar[str] = "learning-rate-too-low"
    runs_at_end: ClassVar[bool] = True
    every: int = 10
    ratio: float = 1e-5
    samples: int = 3
    left: float = 0.1
    horizon: int = 2000
    spread: float = 10.0
    gone: float = 1e-3
    useful: float = 10.0
    speed_up: float = 1.1
    schedule_end: float = 3.0
    slow: float = 1e-4
    square_rate: float = 0.02
    square_low: float = 0.8
    square_high: float = 1.01
    square_steps: int = 10
    square_level: int = 100
    square_end: float = 2.0
    reached: float = 0.5
    outweighed: float = 0.1
    travel: float = 0.1
    travel_fall: float = 0.1
    travel_steps: int = 200
    planned: int = 20
    alike: float = 0.1
    finished_steps: int = 50

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding for the run, or for an optimizer group with a far lower rate than the other groups."""
        if history.step < 0:  # the end of a run without a step
            return
        squared = find_squared_rate(
            history,
            left=self.left,
            given=self.square_rate,
            peak=(self.square_low, self.square_high),
            falling_steps=self.square_steps,
            level_steps=self.square_level,
        )
        warm_up = find_unfinished_warm_up(history, reached=self.reached, steps=self.finished_steps, left=self.left)
        yield from findings_of(self, history, [squared, warm_up])
        yield from find_slow_groups(
            self, history, ratio=self.ratio, samples=self.samples, left=self.left, slow=self.slow
        )
        outweighed = find_outweighed_gradients(
            history,
            outweighed=self.outweighed,
            useful=self.useful * self.ratio,
            samples=self.samples,
            left=self.left,
            spread=self.spread,
        )
        short = find_short_travel(
            history,
            travel=self.travel,
            spread=self.spread,
            fall=self.travel_fall,
            patience=max(self.travel_steps, (history.info.total_steps or 0) // self.planned),
            alike=self.alike,
        )
        yield from findings_of(self, history, [outweighed or self._sign(history) or short])

    def _sign(self, history: History) -> Sign | None:
        """Return the sign of negligible updates, unless something else than the rate makes them small."""
        newest_W = history.param.newest("update.ratio")[structure_of(history).rate_weights.indices_W]
        # cheap: the newest updates must be small enough
        if not np.fmin.reduce(newest_W, initial=np.inf) < self.ratio or not float(median(newest_W)) < self.ratio:
            return None
        level_T = update_levels(history, spread=self.spread)
        steps_T = history.param.steps()[~np.isnan(level_T)]
        level_T = level_T[~np.isnan(level_T)]
        if len(level_T) < self.samples:
            return None
        newest = float(level_T[-1])
        # the rate is not at fault if no update is made: `not-optimized` reports it
        if not newest and are_updates_missing(history, samples=self.samples):
            return None
        # a rate that still rises will be large enough in time
        useful = self.useful * self.ratio
        if is_warming_up(history, newest, useful=useful, horizon=self.horizon, speed_up=self.speed_up):
            return None
        if not may_learn(history) or is_gradient_gone(history, newest, gone=self.gone, spread=self.spread):
            return None
        return find_negligible_updates(
            history,
            (steps_T, level_T),
            ratio=self.ratio,
            samples=self.samples,
            left=self.left,
            schedule_end=self.schedule_end,
        )

    def recovery(self, history: History, finding: Finding) -> Recovery | None:
        """Return the step from which the updates have been larger, or the loss is nearly gone."""
        if is_learned(history, left=self.left):
            return Recovery(history.step, f"less than {100 * self.left:.3g} % of the loss was left")
        keys = {q.key for q in finding.evidence}
        if "lr.reached" in keys:
            return None
        if TRAVEL in keys:
            is_over = has_fallen(history, fall=self.travel_fall)
            return Recovery(history.step, f"the loss fell by {100 * self.travel_fall:.3g} %") if is_over else None
        initial = next((q.value for q in finding.evidence if q.key == "lr.initial"), None)
        if initial is not None:
            end = corrected_step(history, initial, correction=self.square_end)
            return None if end is None else Recovery(end, "the learning rate rose above the square of the optimizer's")
        # a single large update is not a recovery
        if finding.names:
            level_T = group_levels(history, tensors_of(history, finding))
        else:
            level_T = update_levels(history, spread=self.spread)
        is_known_T = ~np.isnan(level_T)
        steps_T, level_T = history.param.steps()[is_known_T], level_T[is_known_T]
        end = start_of_state(level_T >= self.useful * self.ratio, steps_T, least=self.samples)
        return None if end is None else Recovery(end, f"an update changed the weights by {100 * level_T[-1]:.1g} %")

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, that stay quiet, and near misses."""
        yield Example("a rate of 1e-8 for a network from scratch", make_stuck(lr=1e-8), (None,))
        yield Example("a scheduler meant for epochs is stepped per batch", make_decayed(over=8.0), (None,))
        yield Example("the gradients are smaller than eps", make_outweighed(), (None,))
        yield Example("the gradients are smaller than eps, at a rate that makes up for it", make_outweighed(lr=0.1))
        yield Example("the updates are as small, because the rate is low", make_outweighed(share=1.0, lr=5e-5))
        yield Example("a rate of 1e-8 for embeddings", make_looked_up(lr=1e-8, unread=0.5), (None,))
        yield Example("the function of a LambdaLR returns the rate", make_scheduled(peak=3e-3), (None,))
        yield Example("the function of a LambdaLR returns a factor", make_scheduled(peak=1.0))
        yield Example("a run ends in its warm-up", make_scheduled(peak=1.0, warm_up=500, is_finished=True), (None,))
        yield Example("a run ends after its warm-up", make_scheduled(peak=1.0, is_finished=True))
        yield Example("a warm-up passes the square of the rate", make_scheduled(peak=1.0, warm_up=500))
        yield Example("a batch reads one row in ten thousand of an embedding", make_looked_up(lr=1e-6, unread=0.9999))
        yield Example("one matrix is all zeros at first, as a class token is", make_stuck(lr=1e-8, opened=1e6), (None,))
        yield Example("a group has a millionth of the others' rate, by mistake", *make_slowed(factor=1e-6))
        yield Example("a group has a hundredth of the others' rate, as in fine-tuning", make_slowed(factor=1e-2)[0])
        yield Example("at a tenth of the right rate, SGD lowers the loss by 3 % in 240 steps", make_slow(), (None,))
        yield Example("SGD lowers the loss by a quarter in 240 steps", make_slow(fall=0.25))
        yield Example("the weights of each layer have a size of their own, as after training", make_slow(apart=0.2))
        yield Example("a healthy run", Synthetic(steps=60).history())
        yield Example("a warm-up that would take a hundred thousand steps", make_warming(over=1e6), (None,))
        yield Example("a warm-up of ten thousand steps", make_warming(over=1e4))
        yield Example("a warm-up of ten thousand steps in a run of 150", make_warming(over=1e4, planned=150), (None,))
        yield Example("a warm-up of ten thousand steps in a run of as many", make_warming(over=1e4, planned=10000))
        yield Example("a warm-up of ten thousand steps to a rate for fine-tuning", make_warming(over=6e4), (None,))
        yield Example("a first step threw the model to where there is no gradient", make_thrown())
        yield Example("a rate that doubles every 50 steps", make_warming(doubling=50.0))
        yield Example("a schedule ends at zero", make_decayed(over=150.0))
        learned = Synthetic(steps=120, lr=1e-8)
        learned.loss_T[8:] *= 0.01
        yield Example("there is nothing left to learn", learned.history())
        yield Example("only the first layers hardly move", make_vanishing())
