"""Find a single update with a gradient of order 100 times the steady state (GW106)."""

# T = steps of a window, L = parameter tensors

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from gradwatch.detect import Example, interval
from gradwatch.detect.features.baseline import first_steps
from gradwatch.detect.features.consequences import severity_after
from gradwatch.detect.features.finding import finding_of, format_factor
from gradwatch.detect.features.robust_stats import Floats, median
from gradwatch.detect.features.scope import affected_modules
from gradwatch.detect.features.sequential_test import SequentialTest, allowed_error, window_number
from gradwatch.history.store import WINDOW, History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Finding, Quantity

NORM = "grad_norm.before_clip"

PAST_STEPS = 32
"""Steps that define the usual norm: enough for a median, few enough to follow a schedule."""

TAIL_INDEX = 2.5
"""Tail index of the norms: one that is x times as large is at least x ** 2.5 times as rare. Any index above 2 has a
finite variance, without which no average over batches would settle."""

RECORDS = 2 * math.log(WINDOW / PAST_STEPS)
"""Norms per window, at most, that exceed the second largest norm before by some factor, in units of the chance that a
norm exceeds itself by that factor, times the number of the window. Of n exchangeable norms the newest is the largest
with a probability of 1 / n, and each of its two steps down to the third largest counts once."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class GradientSpike:
    """A single gradient far above all gradients before it.

    What it measures: the gradient norm of each step, compared with the median and the second largest of the 32 steps
    before it.

    Why it matters: one such update can throw the weights far off. With Adam its square shrinks the updates of the next
    1,000 steps.

    Example: `torch.cat([images / 255, broken_images])`: a few samples of 0 to 255 in a batch of 0 to 1.

    What to do: inspect the batch of that step (its hash is in the history): inputs that are not normalized, wrong
    labels, outliers. Clip the gradient norm at a few times its median.

    When it is wrong: the first batch of a new task or curriculum stage also has a larger gradient, and is reported.

    How it is detected: the norm over all gradients of each new step against the median and the second largest of the 32
    steps before. Both bounds must be passed. The first says how large the spike is. The second says that this run has
    no such norms all the time, as with tiny batches; the largest may have been an earlier spike. A spike also has to be
    `above_first` times the largest of the first 16 steps, where gradients are large by nature: late in a run, one hard
    sample stands far above the rest and does no harm. From the 33rd step, the second largest of the first steps counts
    instead, because one of them may have been a spike. Last, the spike over its median is compared with the second
    largest such ratio of the whole run. The longer a run, the larger its largest ratio by chance: so the distance grows
    with the run, from 19 to 48 times after 5,000 steps. The chance of a norm so far out is a share of the error budget,
    for norms with a tail index of at least 2.5.

    Source: Pascanu et al. 2013, sec. 3.2, https://arxiv.org/abs/1211.5063; Chowdhery et al. 2022 (PaLM), sec. 5.1, on
    spikes that go with data batches, https://arxiv.org/abs/2204.02311.

    Args:
        every: Steps between two checks, each of all steps since the last. 5: a past step cannot be changed any more.
        factor: Norm in units of the median of the steps before. 30: a third of the order of 100 that spikes have;
            planted ones reach 100 to 500, and healthy runs without warm-up 19.
        above_largest: Norm in units of the second largest of the steps before. 20: healthy runs had single steps 8
            times above it; noise repeats itself, a spike does not.
        above_first: Norm in units of the largest, later of the second largest, of the first 16 steps. 2: gradients are
            large there by nature, so a later norm of that size does no harm.
        wait_steps: Least number of steps before the newest ones, on top of the steps between two checks. 6: fewer have
            no second largest norm to compare with.
        tensor_share: Spike of a tensor over its own median, in units of `factor`, at which it is part of the spike.
            0.25: tensors contribute to the total by different factors.
    """

    code: ClassVar[str] = "GW106"
    kind: ClassVar[str] = "gradient-spike"
    every: int = 5
    factor: float = 30.0
    above_largest: float = 20.0
    above_first: float = 2.0
    wait_steps: int = 6
    tensor_share: float = 0.25

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding for each module, or the run, with a gradient spike since the last check."""
        every = interval(self.every, history.step)
        norm_T = history.scalar(NORM, PAST_STEPS + every)
        if len(norm_T) < 2 * every + self.wait_steps:
            return
        past_T, new_T = norm_T[:-every], norm_T[-every:]
        largest = float(np.fmax.reduce(new_T))
        if all(largest <= self.above_largest * norm for norm in past_T[:2].tolist()):  # cheap: it is below two of them
            return
        # the second largest: one earlier spike must not hide this one
        highest = _second_largest(past_T)
        if not largest > self.above_largest * highest:
            return
        # `non-finite` reports Inf
        new_T = np.where(np.isfinite(new_T), new_T, 0)
        spike, usual = float(new_T.max()), float(median(past_T))
        if not usual > 0 or not spike >= self.factor * usual:
            return
        first_T = first_steps(history, NORM)
        # in a young run the first norms still belong to the past, so the largest counts
        early = _second_largest(first_T) if len(past_T) == PAST_STEPS else float(np.fmax.reduce(first_T))
        if spike < self.above_first * early:
            return
        earlier_T = norms_by_median(history[NORM][:-every])
        if spike / usual < least_by_second_largest(window_number(history)) * _second_largest(earlier_T):
            return
        age = every - int(new_T.argmax())
        yield from self._findings(history, age=age, spike=spike, usual=usual, highest=highest)

    def _findings(self, history: History, *, age: int, spike: float, usual: float, highest: float) -> Iterator[Finding]:
        """Yield a finding for each module that contributes to the spike `age` rows from the end, or for the run."""
        l2_TL = history.param.window("grad.l2", PAST_STEPS + age)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio_L = l2_TL[-age] / median(l2_TL[:-age])
        affected_L = ratio_L >= self.factor * self.tensor_share
        # if half of the tensors spike, the run does
        is_part = 2 * affected_L.sum() < len(affected_L)
        layers = [layer for layer, _ in affected_modules(history, affected_L, kind=self.kind)] if is_part else [None]
        step = int(history.param.steps(age)[0])
        for layer in layers:
            whose = f" of {layer}" if layer else ""
            yield finding_of(
                self,
                history,
                f"the gradient norm{whose} at step {step} was {format_factor(spike / usual)} times the usual norm",
                Quantity(key="spike.step", label="spike at step", value=float(step)),
                Quantity(key=NORM, value=spike),
                Quantity(key="spike.usual_norm", label="median of the 32 steps before", value=usual),
                Quantity(key="spike.above_median", label="spike / median", value=spike / usual),
                Quantity(
                    key="spike.above_largest",
                    label="spike / second largest norm before it",
                    value=spike / highest,
                ),
                layer=layer,
                severity=severity_after(history, self.kind),
                onset=step,
            )

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, that stay quiet, and near misses."""
        yield Example(
            "one batch has 200 times the usual gradient",
            Synthetic(steps=120).spike(step=83, factor=200).history(),
            (None,),
        )
        layer = Synthetic(steps=120).spike(step=83, factor=1000, layers=4)
        yield Example("one layer's gradient spikes", layer.history(), layer.names(4))
        again = Synthetic(steps=120).spike(step=83, factor=150).spike(step=100, factor=200)
        yield Example("a broken sample comes again within an epoch", again.history(), (None,))
        early = Synthetic(steps=120).spike(step=9, factor=150).spike(step=60, factor=150)
        yield Example("a broken sample of the first steps comes again", early.history(), (None,))
        often = Synthetic(steps=120)
        often.grad_l2_TL[np.flatnonzero(often.t_T % 13 == 5)] *= 100
        yield Example("a few batches of each epoch are a hundred times the others", often.history())
        yield Example("a healthy run", Synthetic(steps=120).history())
        yield Example("noise of a factor of ten, as with batches of two", Synthetic(steps=120, noise=1.2).history())
        yield Example(
            "ten times the usual is within what data do", Synthetic(steps=120).spike(step=83, factor=10).history()
        )
        stage = Synthetic(steps=120)
        stage.grad_l2_TL[60:] *= 8
        yield Example("a new stage of a curriculum has larger gradients", stage.history())


def least_by_second_largest(number: int) -> float:
    """Return how far above the second largest earlier ratio a spike of a window must be to rule out chance.

    Args:
        number: Number of the window, from 1.
    """
    return float((RECORDS / number / allowed_error(SequentialTest.GRADIENT_SPIKE, number)) ** (1 / TAIL_INDEX))


def norms_by_median(norm_T: Floats) -> Floats:
    """Return each norm in units of the median of the `PAST_STEPS` norms before it, or of fewer if there are few."""
    length = min(PAST_STEPS, len(norm_T) // 2)
    past_TK = np.lib.stride_tricks.sliding_window_view(norm_T, length)[:-1]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio_T: Floats = norm_T[length:] / median(past_TK.T)
    return np.where(np.isfinite(ratio_T), ratio_T, np.nan)


def _second_largest(norm_T: Floats) -> float:
    """Return the second largest number, ignoring nan, or nan if there are fewer numbers."""
    if len(norm_T) < 2:
        return math.nan
    second = float(np.sort(np.where(np.isnan(norm_T), -np.inf, norm_T))[-2])
    return second if second >= 0 else math.nan
