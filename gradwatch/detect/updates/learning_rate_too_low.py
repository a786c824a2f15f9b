"""GW303: updates that are negligible relative to the weights, while there is much left to learn."""

# T = steps of a window, M = weight matrices and kernels, W = these, or embeddings where there are none

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, final

import numpy as np
from numpy.typing import NDArray

from gradwatch.detect import Example
from gradwatch.detect.features.baseline import first_steps
from gradwatch.detect.features.consequences import severity_after
from gradwatch.detect.features.finding import finding_of
from gradwatch.detect.features.robust_stats import Floats, median, trend
from gradwatch.detect.features.scope import affected_modules
from gradwatch.detect.features.structure import NEAR_ZERO_GAIN, structure_of
from gradwatch.history.lookahead import Ahead
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.history.table import WINDOW, Steps
from gradwatch.records import Finding, Quantity

SPREAD = 10
"""Ratio of the largest update to the median up to which all layers move alike; where gradients vanish it is larger."""

GONE = 1e-3
"""Size of an update, in units of the first at the same rate, below which its gradient is gone: that of a problem
that is being learned falls by tens, and an update of Adagrad by the root of the number of steps."""

SPAN = 32
"""Steps over which a warm-up is looked at."""

FASTER = 1.1
"""Slope of the second half of them in units of the first's above which the rate rises faster and faster: it may soon be
anywhere. Of a straight line the slopes are the same."""

SLIP = 1e-4
"""Rate of a group, in units of the largest, that nobody chooses: fine-tuning has a hundredth, or a 200th in steps."""

BEGINNING = 8
"""Steps that say where the loss began."""

STANDING = 100
"""Steps after which a loss that stands where it began says something."""

STANDS = 0.99
"""Part of the first loss above which it stands there: medians of 16 and of 50 losses differ by noise as much."""

FALLING = -1.5
"""Slope of the loss in its standard errors below which it is falling, as in `loss-plateau`."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRateTooLow:
    """Updates that change nothing, while there is much left to learn.

    What it measures: the update/weight ratio of the weight matrices, of which the median must be below `ratio` and even
    the largest below ten times that, in `samples` samples in a row (but for matrices that began near zero, of which
    nothing can be said), while the rate is not rising, or rises so slowly in a straight line that the ratio would take
    more than `horizon` further steps to reach ten times `ratio`, or more than are planned (`total_steps`), and the loss
    is still a good part of what it was at the start. If it was larger before, it must have been that low for a third of
    the run so far: what a schedule ends with takes a fiftieth (cosine) to a quarter (milestones) of a run. A model that
    is nothing but embeddings is judged by the rows that a batch looked up: a table moves by the root of their share
    less than they do. Layers of a group whose rate is a ten thousandth of another's are judged for themselves.
    And, where the loss stands where it began after 100 steps, whether the weights have travelled by less than `travel`
    of themselves in all of them. Where an update is a thousandth of the first at the same rate, the gradient is gone.

    Why it matters: at 1e-5 per step ten thousand steps change a weight by a tenth of itself at most.

    When it is wrong: a trained model that is only nudged; a noisy problem whose loss has no further to fall. Where
    only some layers hardly move it is another illness (vanishing gradients, a dead layer).

    What to do: raise the rate by ten until the ratio is near 1e-3; look whether a scheduler that counts epochs is
    stepped for every batch.

    Source: LeCun et al. 1998, "Efficient BackProp", sec. 4.7; Karpathy, CS231n, "Ratio of weights:updates",
    https://cs231n.github.io/neural-networks-3/#ratio.

    Args:
        every: Steps between two looks. 10: updates are measured that often.
        ratio: Update/weight ratio up to which an update is negligible. 1e-5: a hundredth of the usual 1e-3; careful
            fine-tuning was at 2e-4.
        samples: Samples in a row. 3: twenty steps at the default schedule.
        left: Loss, in units of that of the first 8 steps, above which there is something left to learn. 0.1: runs at
            the end of their schedule were below, but for noisy problems.
        horizon: Steps that a warm-up may still need to a ratio that moves something. 2000: the longest that are in use,
            10000 steps to the usual 1e-3, are there after a tenth of them.
        travel: Sum of all update/weight ratios up to which nothing can have been learned. 0.01: a hundredth of the
            weights, where careful fine-tuning moves by two hundredths in 100 steps.
    """

    code: ClassVar[str] = "GW303"
    kind: ClassVar[str] = "learning-rate-too-low"
    every: int = 10
    ratio: float = 1e-5
    samples: int = 3
    left: float = 0.1
    horizon: int = 2000
    travel: float = 0.01

    def rules_out(self, ahead: Ahead) -> NDArray[np.bool_]:
        """Say at which steps no update is small, or none was measured."""
        ratio_DW = ahead.newest("update.ratio")[:, structure_of(ahead.history).rate_weights.indices_W]
        return np.asarray(~(ratio_DW < self._small).any(axis=1), np.bool_)

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding for the run, or for a group of the optimizer whose rate is another's by a slip."""
        yield from self._of_groups(history)
        weights_W = structure_of(history).rate_weights.indices_W
        newest_W = history.param.newest("update.ratio")[weights_W]
        if np.isnan(newest_W).all() or not float(median(newest_W)) < self._small:
            return
        ratio_T = _level(_ratios(history, weights_W))
        steps_T = history.param.steps()[~np.isnan(ratio_T)]
        ratio_T = ratio_T[~np.isnan(ratio_T)]
        if len(ratio_T) < self.samples or self._is_warming_up(history, float(ratio_T[-1])):
            return
        if not _may_learn(history, weights_W) or _is_gradient_gone(history, weights_W, float(ratio_T[-1])):
            return
        yield from self._negligible(history, steps_T, ratio_T)
        yield from self._hardly_travelled(history, steps_T, ratio_T)

    @property
    def _small(self) -> float:
        """Update/weight ratio up to which there is something to look at."""
        return max(self.ratio, self.travel / STANDING)

    def _negligible(self, history: History, steps_T: Steps, ratio_T: Floats) -> Iterator[Finding]:
        """Yield a finding where updates are negligible now, and not just at the end of a schedule."""
        moved = np.flatnonzero(ratio_T >= self.ratio)
        first = int(moved[-1]) + 1 if len(moved) else 0
        if len(ratio_T) - first < self.samples:
            return
        still = int(history.step - steps_T[first])
        is_tail = len(moved) > 0 and 3 * still < history.step
        if is_tail or not self._is_left(history) or (history.scalar("skipped", still + 1) == 1).any():
            return
        largest = float(ratio_T[first:].max())
        yield self._finding(
            history, f"for {still} steps the weights have moved by {largest:.1g} of themselves a step", largest
        )

    def _hardly_travelled(self, history: History, steps_T: Steps, ratio_T: Floats) -> Iterator[Finding]:
        """Yield a finding where all steps so far led nowhere, and the loss stands where it began."""
        length = min(history.step + 1, WINDOW)
        travel = float(ratio_T @ np.diff(steps_T, append=history.step) + ratio_T.max() * steps_T[0])
        if not history.step >= STANDING or travel >= self.travel:
            return
        if any(f.kind == self.kind for f in history.findings) or (history.scalar("skipped", length) == 1).any():
            return
        loss_T = history.scalar("loss", length)
        first, newest = float(median(first_steps(history, "loss"))), float(median(loss_T[-STANDING // 2 :]))
        if not newest > STANDS * first > 0 or not trend(loss_T) > FALLING:
            return
        yield self._finding(
            history,
            f"in {history.step} steps the weights have moved by {100 * travel:.1g} % of themselves at most, "
            "and the loss stands where it began",
            float(ratio_T.max()),
        )

    def _finding(self, history: History, message: str, ratio: float) -> Finding:
        return finding_of(
            self,
            history,
            message,
            Quantity(key="update.ratio.median", label="update.ratio, median", value=ratio),
            Quantity(key="lr.0", value=float(history.run.newest("lr.0")[0])),
            Quantity(key="loss", value=float(history.run.newest("loss")[0])),
            severity=severity_after(history, self.kind),
        )

    def _of_groups(self, history: History) -> Iterator[Finding]:
        """Yield a finding for the layers of each group that has next to nothing of the others' rate."""
        matrices_M = structure_of(history).matrices.indices_M
        is_small_M = history.param.newest("update.ratio")[matrices_M] < self.ratio
        if history.groups < 2 or not is_small_M.any() or not self._is_left(history):
            return
        rate_TG = np.stack([history.scalar(f"lr.{g}", SPAN) for g in range(history.groups)], axis=1)
        is_slow_G = (
            (rate_TG[-1] > 0) & (rate_TG[-1] <= SLIP * np.fmax.reduce(rate_TG[-1])) & (rate_TG[-1] <= rate_TG[0])
        )
        ratio_TL = history.param.window("update.ratio")
        ratio_TL = ratio_TL[~np.isnan(ratio_TL).all(axis=1)][-self.samples :]
        if len(ratio_TL) < self.samples or not is_slow_G.any():
            return
        is_slow_L = np.append(is_slow_G, False)[[-1 if la.group is None else la.group for la in history.info.layers]]
        still_L = is_slow_L & (ratio_TL < self.ratio).all(axis=0) & (history.param.newest("grad.l2") > 0)
        if not (ratio_TL[:, ~is_slow_L] >= self.ratio).any(axis=1).all():
            return
        for layer, group in affected_modules(history, still_L, kind=self.kind):
            own, others = (float(np.fmax.reduce(ratio_TL[-1, rows])) for rows in (group, ~is_slow_L))
            yield finding_of(
                self,
                history,
                f"{layer or 'the whole model'} moves by {own:.1g} of itself a step, as its group has "
                "next to nothing of the others' rate",
                Quantity(key="update.ratio", value=own),
                Quantity(
                    key="update.ratio.other_groups", label="update.ratio of the other groups, largest", value=others
                ),
                layer=layer,
                severity=severity_after(history, self.kind),
            )

    def _is_warming_up(self, history: History, level: float) -> bool:
        """Say whether the rate is rising, in a way that will bring it somewhere from the update/weight ratio it has."""
        rate_T = history.scalar("lr.0", SPAN)
        middle, last = len(rate_T) // 2, len(rate_T) - 1
        early, late = (rate_T[middle] - rate_T[0]) / middle, (rate_T[last] - rate_T[middle]) / (last - middle)
        if not late > 0 or late > FASTER * early:
            return bool(late > 0)
        to_come = (10 * self.ratio / level - 1) * rate_T[last] / late if level > 0 else np.inf
        left = (history.info.total_steps or np.inf) - history.step
        return bool(to_come <= min(self.horizon, left))

    def _is_left(self, history: History) -> bool:
        """Say whether the loss is still a good part of what it was."""
        first = float(median(first_steps(history, "loss", BEGINNING)))
        return float(median(history.scalar("loss", 16))) > self.left * first

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, that stay quiet, and near misses."""
        yield Example("a rate of 1e-8 for a network from scratch", _stuck(lr=1e-8), (None,))
        yield Example("a scheduler meant for epochs is stepped per batch", _decayed(over=8.0), (None,))
        yield Example("a rate of 1e-8 for embeddings", _looked_up(lr=1e-8, unread=0.5), (None,))
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
        yield Example("a loss that stands while weights creep", _standing(), (None,))
        yield Example("a loss that falls while they do", _standing(fall=0.05))
        yield Example("a first step threw it to where there is no gradient", _thrown())
        yield Example("a rate that doubles every 50 steps", _warming(doubling=50.0))
        yield Example("a schedule ends at zero", _decayed(over=150.0))
        learned = Synthetic(steps=120, lr=1e-8)
        learned.loss_T[8:] *= 0.01
        yield Example("there is nothing left to learn", learned.history())
        yield Example("only the first layers hardly move", _vanishing())


def _may_learn(history: History, weights_W: NDArray[np.intp]) -> bool:
    """Say whether an optimizer holds what is watched, and gradients arrive."""
    is_held = any(layer.group is not None for layer in history.info.layers)
    return is_held and bool((history.param.newest("grad.l2")[weights_W] > 0).any())


def _level(ratio_TW: Floats) -> Floats:
    """Return the median ratio of each step, or a tenth of the largest where that is more; nan where none is known."""
    level_T: Floats = np.fmax(median(ratio_TW.T), np.fmax.reduce(ratio_TW, axis=1) / SPREAD)
    return level_T


def _is_gradient_gone(history: History, weights_W: NDArray[np.intp], newest: float) -> bool:
    """Say whether an update has become next to nothing beside the first at the same rate: that is not the rate's."""
    ratio = _level(first_steps(history, "update.ratio", 1)[:, weights_W] * _began(history, weights_W))[0]
    return bool(newest * first_steps(history, "lr.0", 1)[0] < GONE * ratio * history.run.newest("lr.0")[0])


def _began(history: History, weights_W: NDArray[np.intp]) -> Floats:
    """Return 1 for weights of which a ratio says something, and nan for those that began near zero."""
    structure, first_W = (
        structure_of(history),
        first_steps(history, "weight.l2", 1)[0, weights_W],
    )  # measured at the first step
    return np.where(
        first_W > (NEAR_ZERO_GAIN if len(structure.matrices.indices_M) else 0) * structure.rate_weights.unit_norm_W,
        1,
        np.nan,
    )


def _ratios(history: History, weights_W: NDArray[np.intp]) -> Floats:
    """Return the update/weight ratios of the window, of shape (T, W), of embeddings those of the rows read."""
    ratio_TW: Floats = history.param.window("update.ratio")[:, weights_W] * _began(history, weights_W)
    if len(structure_of(history).matrices.indices_M):
        return ratio_TW
    read_TW = 1 - history.param.window("grad.zero_frac")[:, weights_W]
    ratios_TW: Floats = ratio_TW / np.sqrt(np.where(read_TW > 0, read_TW, np.nan))
    return ratios_TW


def _slowed(*, factor: float) -> tuple[History, tuple[str, ...]]:
    made = Synthetic(steps=60).own_rate(4, factor=factor)
    return made.history(), made.names(4)


def _stuck(*, lr: float, opened: float = 1.0) -> History:
    """Return a run at a rate, of which the last matrix began near zero and moves that much more."""
    made = Synthetic(steps=60, lr=lr)
    made.loss_T[:] = 2.3
    if opened > 1:
        made.weight_l2_TL[:, -1] = 1e-3
        made.update_factor_TL[:, -1] = opened
    return made.history()


def _looked_up(*, lr: float, unread: float) -> History:
    """Return a run of embeddings only, of which a batch leaves so many rows alone."""
    made = Synthetic(steps=60, lr=lr)
    made.info = replace(made.info, layers=tuple(replace(i, module_type="Embedding") for i in made.info.layers))
    made.zero_frac_TL[:] = unread
    made.loss_T[:] = 2.3
    return made.history()


def _decayed(*, over: float) -> History:
    """Return a run whose rate falls tenfold every `over` / 2 steps."""
    made = Synthetic(steps=200)
    made.lr_T *= 10.0 ** (-np.maximum(made.t_T - 200 + 1.1 * over if over > 50 else made.t_T, 0) / over * 2)
    made.loss_T[:] = np.maximum(made.loss_T, 0.8)
    return made.history()


def _warming(*, over: float = 1.0, doubling: float = 0.0, planned: int | None = None) -> History:
    """Return a run whose rate rises to a usual one in a straight line of so many steps, or doubles now and then."""
    made = Synthetic(steps=120)
    made.info = replace(made.info, total_steps=planned)
    made.lr_T = 1e-8 * 2 ** (made.t_T / doubling) if doubling else 1e-3 * (made.t_T + 1) / over
    made.loss_T[:] = 2.3
    return made.history()


def _standing(*, fall: float = 0.0) -> History:
    """Return a run at a thirtieth of a usual rate, whose loss falls by a part."""
    made = Synthetic(steps=140, lr=3e-5)
    made.loss_T = 2.3 * (1 - fall * made.t_T / 140) * np.exp(0.01 * made.rng.standard_normal(made.steps))
    return made.history()


def _thrown() -> History:
    """Return a run under SGD whose gradients are gone after the first update."""
    made = Synthetic(steps=60, optimizer="SGD", lr=0.1)
    made.grad_l2_TL[1:] *= 1e-6
    made.loss_T[:] = 2.3
    return made.history()


def _vanishing() -> History:
    made = Synthetic(steps=60, optimizer="SGD", lr=0.1).vanishing(decades=9)
    return made.history()
