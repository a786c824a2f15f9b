"""GW107: one layer's gradient is about 1,000 times that of all others."""

# T = steps of a window, M = weight matrices and kernels

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
from numpy.typing import NDArray

from gradwatch.detect import Example
from gradwatch.detect._depth import depth, matrix_sizes
from gradwatch.detect._follow_on import settled
from gradwatch.detect._noted import noted
from gradwatch.detect._robust import Floats, log10, median
from gradwatch.detect._scope import first_scope
from gradwatch.detect._words import factor
from gradwatch.history.ahead import Ahead
from gradwatch.history.store import History
from gradwatch.history.synthetic import Synthetic
from gradwatch.records import Finding, Quantity, Severity

HEADS = "tape-heads"
"""Event of several last layers that share what lies before them; its values are their places in the model."""

SMALL = 0.05
"""Size of a weight matrix, in units of the one that keeps the size of the signal, below which it started near zero."""

USUAL = 0.01
"""Update/weight ratio up to which a layer learns as usual, at ten times the 1e-3 that rates are chosen for."""

EARLY = 64
"""Steps in which heads are compared: later one of them may have learned all there is, and its gradient is gone."""

LOWER = 0.1
"""Rate of a layer's group, in units of the lowest of the others', at which somebody has made up for its gradient."""

FEW = 4
"""Weight matrices up to which the output layer counts as well: with more it leads by nature."""

INPUT = 0.1
"""Size of an output layer's inputs (of its weight's gradient in units of its bias's) below which it does not lead: the
others lag behind, and what they pass on to it is next to nothing."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LayerImbalance:
    """One layer whose gradient is far larger than every other's.

    What it measures: the size of a gradient element (root mean square) in each weight matrix, and how far the largest
    lies above the second largest, at every step of a window. Biases, norms, scalars and embeddings are left out: their
    gradients are of another size by nature, and so is that of the output layer of a deeper network. The same for the
    update/weight ratios, where one update replaces `replaced` of a matrix and next to nothing of all others. And, in
    the first
    64 steps, the same among the heads of a model, as the tape tells them: last layers side by side, whose gradients
    meet in what they share. There the largest decides what is learned, and the others train on what is left.

    Why it matters: one learning rate cannot serve both. What is right for the others makes this layer bounce, what is
    right for this one leaves the others where they are; clipping by the norm leaves room for this one only.

    When it is wrong: a head that is zero-initialised or has a much larger loss weight on purpose. Adam hides the
    imbalance from the updates, but not from clipping, weight decay or the condition of the problem.

    What to do: bring the layer's inputs to unit scale (raw features in metres or years beside standardised ones),
    weight its loss, or give it a learning rate of its own; where it has a lower one, that is for information.

    Source: LeCun et al. 1998, "Efficient BackProp", sec. 4.3 on input scale and 4.7 on learning rates per layer,
    https://doi.org/10.1007/3-540-49430-8_2.

    Args:
        every: Steps between two looks. 10: it is there all the time or not at all.
        decades: Lead over the second largest, in powers of ten. 2.5: the largest lead in healthy runs was 1.1
            (`scripts/study_healthy.py`); planted faults start at 3.
        steps: Newest steps of which the smallest lead counts. 10: a batch alone is no imbalance.
        replaced: Update/weight ratio at which a lead over the other matrices counts. 0.5: half of the matrix is gone.
    """

    code: ClassVar[str] = "GW107"
    kind: ClassVar[str] = "layer-imbalance"
    every: int = 10
    decades: float = 2.5
    steps: int = 10
    replaced: float = 0.5

    def rules_out(self, ahead: Ahead) -> NDArray[np.bool_]:
        """Say at which steps neither the gradient nor the update of a weight matrix stands out."""
        matrices_M = depth(ahead.history).matrices_M
        if len(matrices_M) < 3:
            return ahead.steps_D >= EARLY
        size_DM = np.sort(matrix_sizes(ahead.history, ahead.newest("grad.l2")), axis=1)
        with np.errstate(invalid="ignore"):
            stands_out_D = ~(size_DM[:, -2:] < 10**self.decades * size_DM[:, -3:-1]).all(axis=1)  # nan may hide it
        is_replaced_D = (ahead.newest("update.ratio")[:, matrices_M] >= self.replaced).any(axis=1)
        return ~stands_out_D & ~is_replaced_D & (ahead.steps_D >= EARLY)

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding for the layer that dwarfs the others."""
        if history.step < EARLY:
            yield from self._heads(history)
        shape = depth(history)
        if len(shape.matrices_M) < 3:
            return
        yield from self._replaced(history)
        newest_M = np.sort(matrix_sizes(history, history.param.newest("grad.l2")))  # nan comes last
        known_M = newest_M if newest_M[-1] == newest_M[-1] else newest_M[~np.isnan(newest_M)]
        if len(known_M) < 3 or not 0 < known_M[-2] <= known_M[-1] < np.inf:
            return
        if not (known_M[-2:] >= 10**self.decades * known_M[-3:-1]).any():
            return
        l2_TL = history.param.window("grad.l2", self.steps)
        level_M = log10(matrix_sizes(history, median(l2_TL)))
        if len(l2_TL) < self.steps or np.isnan(level_M).all():
            return
        top, lead = self._leader(history, l2_TL, level_M)
        if not lead >= self.decades:
            return
        layer = first_scope(history, int(shape.matrices_M[top]))
        yield Finding(
            code=self.code,
            kind=self.kind,
            layer=layer,
            step=history.step,
            severity=Severity.INFO if _has_lower_rate(history, top) else settled(history, self.kind),
            message=f"the gradient of {layer} is at least {factor(10**lead)} times that of any other "
            + ("layer" if level_M[top] == np.nanmax(level_M) else "layer before the output"),
            evidence=(
                Quantity(name="smallest lead over the second largest", value=lead, unit="decades"),
                Quantity(
                    name="lead over the median layer", value=float(level_M[top] - median(level_M)), unit="decades"
                ),
                Quantity(name="gradient element", value=float(10 ** level_M[top])),
            ),
        )

    def _replaced(self, history: History) -> Iterator[Finding]:
        """Yield a finding for the layer that an update replaces, while it hardly moves the others."""
        shape = depth(history)
        ratio_M = history.param.newest("update.ratio")[shape.matrices_M]
        if not np.fmax.reduce(ratio_M) >= self.replaced:  # nan, where it was not measured, is not
            return
        gain_M = history.param.newest("weight.l2")[shape.matrices_M] / shape.root_fan_out_M
        counts_M = (gain_M > SMALL) | self._is_leading(matrix_sizes(history, history.param.newest("grad.l2")))
        ratio_M = np.where(counts_M, ratio_M, np.nan)
        second, largest = np.sort(ratio_M[~np.isnan(ratio_M)])[-2:] if np.count_nonzero(counts_M) > 2 else (1, 0)
        if not (self.replaced <= largest < np.inf and second <= min(USUAL, largest * 10**-self.decades)):
            return
        layer = first_scope(history, int(shape.matrices_M[np.nanargmax(ratio_M)]))
        yield Finding(
            code=self.code,
            kind=self.kind,
            layer=layer,
            step=history.step,
            severity=settled(history, self.kind),
            message=f"an update replaces {100 * largest:.3g} % of {layer} and {100 * second:.1g} % of others at most",
            evidence=(
                Quantity(name="update.ratio", value=float(largest)),
                Quantity(name="update.ratio of the second largest", value=float(second)),
            ),
        )

    def _leader(self, history: History, l2_TL: Floats, level_M: Floats) -> tuple[int, float]:
        """Return the matrix with the largest gradient and its smallest lead over the second, in decades.

        Where the output layer has the largest by nature, or for what is fed to it, the others are compared; what leads
        these has to stand out from a group, rather than to be the upper end of a slope.
        """
        shape = depth(history)
        log_TM = log10(l2_TL[:, shape.matrices_M] / shape.root_numel_L[shape.matrices_M])
        top, lead = _lead(log_TM, level_M)
        if top < len(level_M) - 1:
            return top, lead
        if lead >= self.decades and len(level_M) <= FEW and not self._has_no_input(history, l2_TL):
            return top, lead
        rest_M = np.sort(level_M[:-1][~np.isnan(level_M[:-1])])
        if len(rest_M) < 3 or rest_M[-1] - rest_M[-2] < rest_M[-2] - rest_M[0]:
            return top, 0.0
        return _lead(log_TM[:, :-1], level_M[:-1])

    def _has_no_input(self, history: History, l2_TL: Floats) -> bool:
        """Say whether the gradient of the output layer's weight is far below that of its bias."""
        shape = depth(history)
        if shape.output_bias is None:
            return False
        pair = [int(shape.matrices_M[-1]), shape.output_bias]
        weight, bias = median(l2_TL[:, pair]) / shape.root_numel_L[pair]
        return bool(weight < INPUT * bias)

    def _is_leading(self, size_M: Floats) -> NDArray[np.bool_]:
        """Say which matrix has a gradient far above all others': a small one that a factor behind it makes up for."""
        known_M = np.sort(size_M[~np.isnan(size_M)])
        second = known_M[-2] if len(known_M) > 1 else np.inf
        is_leading_M: NDArray[np.bool_] = size_M >= 10**self.decades * second
        return is_leading_M & (second > 0)

    def _heads(self, history: History) -> Iterator[Finding]:
        """Yield a finding for the head that dwarfs the others."""
        for event in noted(history, HEADS):
            heads_H = np.array(list(event.values.values()), np.intp)
            l2_TL = history.param.window("grad.l2", self.steps)
            log_TH = log10(l2_TL[:, heads_H] / depth(history).root_numel_L[heads_H])
            if len(log_TH) < self.steps or np.isnan(log_TH).any():  # heads that train in turn never meet
                continue
            top = int(np.argmax(median(log_TH)))
            lead = float((log_TH[:, top] - np.delete(log_TH, top, axis=1).max(axis=1)).min())
            if lead < self.decades:
                continue
            layer = first_scope(history, int(heads_H[top]))
            yield Finding(
                code=self.code,
                kind=self.kind,
                layer=layer,
                step=history.step,
                severity=Severity.WARNING,
                message=f"the gradient of {layer} is at least {factor(10**lead)} times that of any other head: what "
                "they share learns for it alone",
                evidence=(
                    Quantity(name="smallest lead over the second largest head", value=lead, unit="decades"),
                    Quantity(name="gradient element", value=float(10 ** log_TH[-1, top])),
                ),
            )

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, that stay quiet, and near misses."""
        sick = Synthetic(steps=40).imbalance(4, factor=1e4)
        yield Example("a layer has raw inputs", sick.history(), sick.names(4))
        heads = {"layers.10": 10.0, "layers.11": 11.0}
        tasks = Synthetic(steps=40).imbalance(11, factor=1e4).note(HEADS, values=heads)
        yield Example("one of two heads has targets in millimetres", tasks.history(), tasks.names(11))
        even = Synthetic(steps=40).imbalance(11, factor=50).note(HEADS, values=heads)
        yield Example("two heads, one with fifty times the gradient", even.history())
        rates = Synthetic(steps=40)
        rates.update_factor_TL[:, 4] = 1e4
        yield Example(
            "one layer has a rate of its own, ten thousand times the others'", rates.history(), rates.names(4)
        )
        yield Example("a healthy run", Synthetic(steps=40).history())
        all_of_it = Synthetic(steps=40)
        all_of_it.update_factor_TL[:] = 1e4
        yield Example("updates replace all layers: that is the rate", all_of_it.history())
        yield Example(
            "fifty times the others is usual for an output layer",
            Synthetic(steps=40).imbalance(11, factor=50).history(),
        )
        yield Example(
            "a single spike is no imbalance", Synthetic(steps=41).spike(step=40, factor=1e5, layers=4).history()
        )
        fed = Synthetic(steps=40).imbalance(4, factor=1e4)
        fed.grad_l2_TL[:, -1] = 3 * fed.grad_l2_TL[:, 4]
        yield Example("the output layer has as large a gradient, for what it is fed", fed.history(), fed.names(4))
        yield Example("vanishing gradients have a second largest", Synthetic(steps=40).vanishing(decades=12).history())
        known = Synthetic(steps=40).imbalance(4, factor=1e4).own_rate(4, factor=1e-3)
        yield Example("a layer of another unit has a rate of its own: for information", known.history(), known.names(4))


def _lead(log_TM: Floats, level_M: Floats) -> tuple[int, float]:
    """Return the matrix with the highest level, and its smallest lead over the largest other one."""
    top = int(np.nanargmax(level_M))
    rest_T = np.fmax.reduce(np.delete(log_TM, top, axis=1), axis=1)
    return top, float(np.fmin.reduce(log_TM[:, top] - rest_T))


def _has_lower_rate(history: History, top: int) -> bool:
    """Say whether the group of a weight matrix has a far lower rate than those of all others."""
    groups = [history.info.layers[i].group for i in depth(history).matrices_M]
    rates = [math.nan if group is None else float(history.run.newest(f"lr.{group}")[0]) for group in groups]
    others = [rate for i, rate in enumerate(rates) if i != top and groups[i] != groups[top]]
    return bool(others) and rates[top] <= LOWER * min(others)
