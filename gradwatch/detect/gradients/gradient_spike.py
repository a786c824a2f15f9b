"""GW106: a single update whose gradient is of order 100 times the steady state."""

# T = steps of a window, D = windows, W = steps of one, L = parameter tensors

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
from numpy.typing import NDArray

from gradwatch.detect import Example
from gradwatch.detect.features.baseline import beginning
from gradwatch.detect.features.consequences import settled
from gradwatch.detect.features.finding import finding_of
from gradwatch.detect.features.robust_stats import Floats, median
from gradwatch.detect.features.scope import scopes
from gradwatch.detect.features.words import factor
from gradwatch.history.lookahead import Ahead
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Finding, Quantity

PAST = 32
"""Steps that say what is usual: enough for a median, few enough to follow a schedule."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class GradientSpike:
    """Single updates far above the steady state.

    What it measures: the norm over all gradients of each new step against the median and the second largest of the 32
    steps before. Both bounds must be passed: the first says how large the spike is, the second that this run does not
    do such things all the time, as tiny batches do; the largest may have been the spike before. A spike also has to be
    twice the largest of the first 16 steps, where gradients are large by nature: late in a run, one hard sample stands
    far above the rest and does no harm. From the 33rd step on, the second largest of those will do: where one of them
    was a spike, 32 others say by then whether that is usual.

    Why it matters: one such batch, undone by no later one, can throw the weights far off; with Adam its square stays
    in the second moment for about 1,000 steps and shrinks every update in that time.

    When it is wrong: the first batch of a new task or of a new stage of a curriculum is a jump and no spike; it is
    reported all the same, because at that step nobody can know.

    What to do: look at the batch of the step (its hash is in the history): samples that were not normalised, broken
    labels, an extreme outlier. Clip the gradient norm at a few times its median.

    Source: Pascanu et al. 2013, sec. 3.2, https://arxiv.org/abs/1211.5063; Chowdhery et al. 2022 (PaLM), sec. 5.1, on
    spikes that go with data batches, https://arxiv.org/abs/2204.02311.

    Args:
        every: Steps between two looks, each at all steps since the last. 5: nothing can be done about a step gone by.
        factor: Norm in units of the median of the steps before. 30: a third of the order of 100 that spikes have;
            planted ones reach 100 to 500, and healthy runs without warm-up 19.
        above_largest: Norm in units of the second largest of the steps before. 20: healthy runs had
            single steps 8 times above it; noise repeats itself, a spike does not.
    """

    code: ClassVar[str] = "GW106"
    kind: ClassVar[str] = "gradient-spike"
    every: int = 5
    factor: float = 30.0
    above_largest: float = 20.0

    def rules_out(self, ahead: Ahead) -> NDArray[np.bool_]:
        """Say at which steps no norm since the last look is far above the largest of those before."""
        norm_DW = ahead.scalars("grad_norm.before_clip", PAST + self.every)
        past_D = second_largest(norm_DW[:, : -self.every])
        return np.asarray(~(np.fmax.reduce(norm_DW[:, -self.every :], axis=1) > self.above_largest * past_D), np.bool_)

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding for each module, or the run, whose gradient was a spike since the last look."""
        norm_T = history.scalar("grad_norm.before_clip", PAST + self.every)
        if len(norm_T) < 2 * self.every + 6:
            return
        past_T, new_T = norm_T[: -self.every], norm_T[-self.every :]
        highest = float(second_largest(past_T[None])[0])
        if not np.fmax.reduce(new_T) > self.above_largest * highest:
            return
        new_T = np.where(np.isfinite(new_T), new_T, 0)
        usual = float(median(past_T))
        if not usual > 0 or not new_T.max() >= self.factor * usual:
            return
        first_T = beginning(history, "grad_norm.before_clip")
        early = second_largest(first_T[None])[0] if len(past_T) == PAST else np.fmax.reduce(first_T)
        if new_T.max() < 2 * float(early):
            return
        age = self.every - int(new_T.argmax())
        yield from self._findings(history, age=age, spike=float(new_T.max()), usual=usual, highest=highest)

    def _findings(self, history: History, *, age: int, spike: float, usual: float, highest: float) -> Iterator[Finding]:
        """Write down a spike `age` rows from the end, with the tensors that have a part in it."""
        l2_TL = history.param.window("grad.l2", PAST + age)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio_L = l2_TL[-age] / median(l2_TL[:-age])
        ill_L = ratio_L >= self.factor / 4  # a spike of the whole is one of most tensors, by different factors
        named = scopes(history, ill_L, kind=self.kind) if 2 * ill_L.sum() < len(ill_L) else [(None, [])]
        step = int(history.param.steps(age)[0])
        for layer, _ in named:
            whose = f" of {layer}" if layer else ""
            yield finding_of(
                self,
                history,
                f"the gradient{whose} at step {step} was {factor(spike / usual)} times the usual",
                Quantity(key="spike.step", label="spike at step", value=float(step)),
                Quantity(key="grad_norm.before_clip", value=spike),
                Quantity(key="spike.usual_norm", label="median of the 32 steps before", value=usual),
                Quantity(key="spike.above_median", label="times the median", value=spike / usual),
                Quantity(
                    key="spike.above_largest",
                    label="times the second largest of the steps before",
                    value=spike / highest,
                ),
                layer=layer,
                severity=settled(history, self.kind),
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
        yield Example("so it does where it came among the first", early.history(), (None,))
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


def second_largest(norm_DW: Floats) -> Floats:
    """Return the second largest number of each window, of shape (D,), nan left out; of fewer numbers, nan."""
    sorted_DW = np.sort(np.where(np.isnan(norm_DW), -np.inf, norm_DW), axis=1)
    second_D: Floats = sorted_DW[:, -2]
    return np.where(second_D >= 0, second_D, np.nan)
