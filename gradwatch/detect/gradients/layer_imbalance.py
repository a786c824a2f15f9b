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
from gradwatch.detect.features.baseline import beginning
from gradwatch.detect.features.consequences import settled
from gradwatch.detect.features.events import noted
from gradwatch.detect.features.finding import finding_of
from gradwatch.detect.features.robust_stats import Floats, log10, median
from gradwatch.detect.features.scope import first_scope
from gradwatch.detect.features.structure import NEAR_ZERO, depth, matrix_sizes
from gradwatch.detect.features.words import factor
from gradwatch.detect.gradients._imbalance_examples import coefficient, cut, fed, table
from gradwatch.detect.gradients._input_scale import raw_inputs, sizes_of_inputs
from gradwatch.events import HEADS
from gradwatch.history.lookahead import Ahead
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Finding, Quantity, Severity

USUAL = 0.01
"""Update/weight ratio up to which a layer learns as usual, at ten times the 1e-3 that rates are chosen for."""

EARLY = 64
"""Steps in which heads are compared: later one of them may have learned all there is, and its gradient is gone."""

LOWER = 0.1
"""Rate of a layer's group, in units of the lowest of the others', at which somebody has made up for its gradient."""

TINY = 30.0
"""First update, in units of a parameter, from which on it is of another unit than the rate is meant for."""

MOST = 0.9
"""Part of the norm of all gradients that is nearly all of it: the others make 0.44 together."""

HALF = 0.5
"""Part of the norm of all gradients from which on a tensor may have nearly all of it, with others of its module."""

DRAWN = "poor-initialization"
"""Finding of layers that were drawn too large: what they feed to others is."""

BEFORE, AFTER = "grad_norm.before_clip", "grad_norm.after_clip"

CONSTANT = 1e-3
"""Spread of a norm, in units of itself, that only clipping leaves: then it was read behind it."""

THROWS = 5
"""Measured updates in a row that must be so."""

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
    the first 64 steps, the same among the heads of a model, as the tape tells them: last layers side by side, whose
    gradients meet in what they share. There the largest decides what is learned, and the others train on what is left.
    And a parameter of up to 16 numbers, no bias, whose first update was 30 times itself and more: where updates stay as
    large as it is, and nearly all of the gradient is its own, the rate of the others throws it about its place. And,
    where clipping cuts the norm of all gradients step after step, whether one module makes up nearly all of it: what
    the others get is cut by as much. The same without clipping, where a layer's inputs are of another unit: of that
    size is the gradient of its weight in units of that of its bias; and where another matrix then gets next to nothing.

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
            (`scripts/studies/false_alarms.py`); planted faults start at 3.
        steps: Newest steps of which the smallest lead counts. 10: a batch alone is no imbalance.
        thrown: Update/weight ratio of a few numbers, in the median of 5 measurements, that throws them about. 0.1: what
            finds its place takes updates of a fiftieth of itself and less after as many measurements.
        rest: Norm of all other gradients, in units of a module's own, where clipping cuts it. 0.02: it was 0.15 at
            least in healthy runs.
        raw: The same of a layer whose inputs are `decades` beyond 1 in size. 0.1: none of 280 healthy runs had as large
            ones and less than 0.3 left, with biases before a normalisation too, whose gradient is rounding.
        replaced: Update/weight ratio at which a lead over the other matrices counts. 0.5: half of the matrix is gone.
    """

    code: ClassVar[str] = "GW107"
    kind: ClassVar[str] = "layer-imbalance"
    every: int = 10
    decades: float = 2.5
    steps: int = 10
    thrown: float = 0.1
    rest: float = 0.02
    raw: float = 0.1
    replaced: float = 0.5

    def rules_out(self, ahead: Ahead) -> NDArray[np.bool_]:
        """Say at which steps neither the gradient nor the update of a weight matrix stands out."""
        matrices_M = depth(ahead.history).matrices_M
        may_D = self._may_throw(ahead) | _is_clipped(*(ahead.scalars(name, self.steps) for name in (BEFORE, AFTER)))
        l2_DL, apart = ahead.newest("grad.l2"), depth(ahead.history).apart_P
        may_D |= (l2_DL[:, apart] >= HALF * ahead.scalar(BEFORE)[:, None]).any(axis=1)
        may_D |= (sizes_of_inputs(ahead.history, l2_DL) >= 10**self.decades).any(axis=1)
        if len(matrices_M) < 3:
            return (ahead.steps_D >= EARLY) & ~may_D
        size_DM = np.sort(matrix_sizes(ahead.history, ahead.newest("grad.l2")), axis=1)
        with np.errstate(invalid="ignore"):
            stands_out_D = ~(size_DM[:, -2:] < 10**self.decades * size_DM[:, -3:-1]).all(axis=1)  # nan may hide it
        is_replaced_D = (ahead.newest("update.ratio")[:, matrices_M] >= self.replaced).any(axis=1)
        return ~stands_out_D & ~is_replaced_D & (ahead.steps_D >= EARLY) & ~may_D

    def _may_throw(self, ahead: Ahead) -> NDArray[np.bool_]:
        """Say at which steps an update of a few numbers is as large as they are."""
        ratio_DF = ahead.newest("update.ratio")[:, depth(ahead.history).few_F]
        return np.asarray((ratio_DF >= self.thrown).any(axis=1), np.bool_)

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding for the layer that dwarfs the others."""
        yield from self._thrown(history)
        yield from self._takes_all(history)
        yield from self._raw(history)
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
        yield finding_of(
            self,
            history,
            f"the gradient of {layer} is at least {factor(10**lead)} times that of any other "
            + ("layer" if level_M[top] == np.nanmax(level_M) else "layer before the output"),
            Quantity(
                key="imbalance.lead_over_second_decades",
                label="smallest lead over the second largest",
                value=lead,
                unit="decades",
            ),
            Quantity(
                key="imbalance.lead_over_median_decades",
                label="lead over the median layer",
                value=float(level_M[top] - median(level_M)),
                unit="decades",
            ),
            Quantity(key="grad.element", label="gradient element", value=float(10 ** level_M[top])),
            layer=layer,
            severity=Severity.INFO
            if _has_lower_rate(history, int(shape.matrices_M[top]))
            else settled(history, self.kind),
        )

    def _replaced(self, history: History) -> Iterator[Finding]:
        """Yield a finding for the layer that an update replaces, while it hardly moves the others."""
        shape = depth(history)
        ratio_M = history.param.newest("update.ratio")[shape.matrices_M]
        if not np.fmax.reduce(ratio_M) >= self.replaced:  # nan, where it was not measured, is not
            return
        gain_M = history.param.newest("weight.l2")[shape.matrices_M] / shape.root_fan_out_M
        counts_M = (gain_M > NEAR_ZERO) | self._is_leading(matrix_sizes(history, history.param.newest("grad.l2")))
        ratio_M = np.where(counts_M, ratio_M, np.nan)
        second, largest = np.sort(ratio_M[~np.isnan(ratio_M)])[-2:] if np.count_nonzero(counts_M) > 2 else (1, 0)
        if not (self.replaced <= largest < np.inf and second <= min(USUAL, largest * 10**-self.decades)):
            return
        layer = first_scope(history, int(shape.matrices_M[np.nanargmax(ratio_M)]))
        yield finding_of(
            self,
            history,
            f"an update replaces {100 * largest:.3g} % of {layer} and {100 * second:.1g} % of others at most",
            Quantity(key="update.ratio", value=float(largest)),
            Quantity(key="update.ratio.second", label="update.ratio of the second largest", value=float(second)),
            layer=layer,
            severity=settled(history, self.kind),
        )

    def _takes_all(self, history: History) -> Iterator[Finding]:
        """Yield a finding for the module that takes nearly all of what clipping lets through, or of what there is."""
        is_clipped = _is_clipped(*(history.scalar(name, self.steps)[None] for name in (BEFORE, AFTER)))[0]
        l2_L, apart = history.param.newest("grad.l2"), depth(history).apart_P
        if not (is_clipped or (l2_L[apart] >= HALF * history.run.newest(BEFORE)[0]).any()):
            return
        l2_TL = np.nan_to_num(history.param.window("grad.l2", self.steps), posinf=0)  # where it is infinite, all is
        top = int(median(l2_TL).argmax())
        infos = history.info.layers
        mine_L = np.array([info.module == infos[top].module != "" or info is infos[top] for info in infos])
        others_T, own_T = (np.linalg.norm(l2_TL[:, part].astype(np.float64), axis=1) for part in (~mine_L, mine_L))
        rest_T = others_T / np.maximum(own_T, np.finfo(np.float32).tiny)
        limits = (is_clipped * self.rest, (top in apart) * 10**-self.decades)
        if len(l2_TL) < self.steps or not 0 < rest_T.min() <= rest_T.max() <= max(limits):
            return
        layer, part = first_scope(history, top), f"{100 * rest_T.max():.2g} % of"
        yield finding_of(
            self,
            history,
            f"the gradient of {layer} takes nearly all that clipping lets through: {part} the norm are left for all "
            "other layers at most"
            if is_clipped
            else f"all other gradients together have {part} the norm of that of {layer} at most",
            Quantity(
                key="imbalance.others_by_own",
                label="norm of all other gradients, by its own",
                value=float(rest_T.max()),
            ),
            Quantity(key=(shown := AFTER if is_clipped else BEFORE), value=float(history.scalar(shown, 1)[0])),
            layer=layer,
            severity=Severity.INFO if _has_lower_rate(history, top) else settled(history, self.kind),
        )

    def _raw(self, history: History) -> Iterator[Finding]:
        """Yield a finding for the layer that swamps others since its inputs are of another unit."""
        l2_TL = history.param.window("grad.l2", self.steps)
        if len(l2_TL) < self.steps or not np.isfinite(l2_TL[-1]).any():
            return
        if not (sizes_of_inputs(history, l2_TL[-1:]) >= 10**self.decades).any():
            return
        if (found := raw_inputs(history, l2_TL, decades=self.decades, left=self.raw)) is None:
            return
        tensor, sign = found
        layer = first_scope(history, tensor)
        is_drawn = any(f.kind == DRAWN and f.severity >= Severity.WARNING for f in history.findings)
        is_known = is_drawn or _has_lower_rate(history, tensor)
        severity = Severity.INFO if is_known else settled(history, self.kind)
        text = f"the inputs of {layer} {sign.message}"
        yield finding_of(self, history, text, *sign.evidence, layer=layer, severity=severity)

    def _thrown(self, history: History) -> Iterator[Finding]:
        """Yield a finding for each parameter of a few numbers that updates throw about zero, and the loss with it."""
        few = depth(history).few_F
        if not len(few) or not (history.param.newest("update.ratio")[few] >= self.thrown).any():
            return
        ratio_TF, grad_TF = (history.param.window(name)[:, few] for name in ("update.ratio", "grad.l2"))
        known_T = ~np.isnan(ratio_TF).all(axis=1)
        first_F = beginning(history, "update.ratio", 1)[0, few]
        if np.count_nonzero(known_T) < THROWS:
            return
        share_TF = grad_TF / history.scalar("grad_norm.before_clip", len(grad_TF))[:, None]
        ratio_F, share_F = median(ratio_TF[known_T][-THROWS:]), median(share_TF[known_T][-THROWS:])
        for place in np.flatnonzero((first_F >= TINY) & (ratio_F >= self.thrown) & (share_F >= MOST)):
            name = history.info.layers[few[place]].name
            yield finding_of(
                self,
                history,
                f"the first update of {name} was {first_F[place]:,.3g} times as large as itself, the newest "
                f"are {ratio_F[place]:.2g} times, and nearly all of the gradient is its own",
                Quantity(key="update.ratio.first", label="update.ratio, first", value=float(first_F[place])),
                Quantity(
                    key="update.ratio.newest_median",
                    label="update.ratio, median of the newest",
                    value=float(ratio_F[place]),
                ),
                Quantity(
                    key="imbalance.share_of_norm", label="its gradient, by the norm of all", value=float(share_F[place])
                ),
                layer=name,
                severity=settled(history, self.kind),
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
            yield finding_of(
                self,
                history,
                f"the gradient of {layer} is at least {factor(10**lead)} times that of any other head: what "
                "they share learns for it alone",
                Quantity(
                    key="imbalance.lead_over_second_head_decades",
                    label="smallest lead over the second largest head",
                    value=lead,
                    unit="decades",
                ),
                Quantity(key="grad.element", label="gradient element", value=float(10 ** log_TH[-1, top])),
                layer=layer,
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
        yield Example("the sum of a loss beside a mean, and clipping", *cut(others=0.005))
        yield Example("a table of energies is kept in another unit", *table(factor=3e4))
        yield Example("days since 1970 are fed to a layer", *fed(19_000.0, others=0.05))
        yield Example("they are, and other layers have gradients as well", fed(19_000.0, others=0.4)[0])
        yield Example("they are, and one other layer is left next to none", *fed(19_000.0, others=0.4, least=1e-4))
        yield Example("pixels of 0 to 255", fed(150.0, others=0.05)[0])
        yield Example("a table with thirty times the gradient of all others", table(factor=100)[0])
        yield Example("an output layer with most of what is clipped", cut(others=0.2)[0])
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
        output = Synthetic(steps=40).imbalance(4, factor=1e4)
        output.grad_l2_TL[:, -1] = 3 * output.grad_l2_TL[:, 4]
        yield Example("the output layer has as large a gradient, for what it is fed", output.history(), output.names(4))
        yield Example("vanishing gradients have a second largest", Synthetic(steps=40).vanishing(decades=12).history())
        yield Example("a coefficient that is thrown about by updates of its own size", *coefficient(thrown=True))
        yield Example("a coefficient that grows out of its first size", coefficient(thrown=False)[0])
        known = Synthetic(steps=40).imbalance(4, factor=1e4).own_rate(4, factor=1e-3)
        yield Example("a layer of another unit has a rate of its own: for information", known.history(), known.names(4))


def _is_clipped(before_DT: Floats, after_DT: Floats) -> NDArray[np.bool_]:
    """Say at which steps clipping has cut the gradient, at that and those before it: windows of shape (D, T)."""
    is_cut_D = (after_DT < (1 - CONSTANT) * before_DT).all(axis=1)
    return np.asarray(is_cut_D | (np.ptp(before_DT, axis=1) <= CONSTANT * before_DT.min(axis=1)), np.bool_)


def _lead(log_TM: Floats, level_M: Floats) -> tuple[int, float]:
    """Return the matrix with the highest level, and its smallest lead over the largest other one."""
    top = int(np.nanargmax(level_M))
    rest_T = np.fmax.reduce(np.delete(log_TM, top, axis=1), axis=1)
    return top, float(np.fmin.reduce(log_TM[:, top] - rest_T))


def _has_lower_rate(history: History, tensor: int) -> bool:
    """Say whether the group of a tensor has a far lower rate than those of all weight matrices of other groups."""
    own, *groups = (history.info.layers[i].group for i in (tensor, *depth(history).matrices_M))
    rate, *others = (
        math.nan if group is None else float(history.run.newest(f"lr.{group}")[0])
        for group in (own, *(group for group in groups if group != own))
    )
    return bool(others) and rate <= LOWER * min(others)
