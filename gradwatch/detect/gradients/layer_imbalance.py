"""Find a layer with a gradient about 1,000 times the gradients of all other layers (GW107)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from gradwatch.detect import Example
from gradwatch.detect.features.finding import Sign, findings_of
from gradwatch.detect.features.structure import structure_of
from gradwatch.detect.gradients.layer_imbalance_rules.examples import (
    make_outgrown,
    make_unscaled_inputs,
)
from gradwatch.detect.gradients.layer_imbalance_rules.growing_group import find_growing_group
from gradwatch.detect.gradients.layer_imbalance_rules.heads import find_dominant_heads
from gradwatch.detect.gradients.layer_imbalance_rules.leading_matrix import find_leading_matrix
from gradwatch.detect.gradients.layer_imbalance_rules.unscaled_inputs import find_unscaled_inputs
from gradwatch.events import HEADS
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Finding


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LayerImbalance:
    """One layer whose gradient is far larger than all others.

    What it measures: the gradient size of each layer, compared with the second largest.

    Why it matters: no learning rate suits both: this layer bounces, or the others stand still. Clipping leaves room for
    this layer only.

    Example: `model(torch.stack([year, price_in_cents, 0.1 * rating], dim=1))`, or the sum of one loss and the mean of
    another.

    What to do: normalize the inputs of the layer, weight its loss, or give it a lower learning rate of its own (then
    reported as info).

    When it is wrong: a head that is zero-initialized, or has a larger loss weight, on purpose. Adam hides the imbalance
    from the updates, but not from clipping or weight decay.

    How it is detected: (1) A leading matrix: the size of a gradient element (root mean square) in each weight matrix.
    The largest has to lie far above the second largest at every step of a window. Biases, norms, scalars and embeddings
    are left out, because their gradients differ in size by nature; so is the output layer of a deeper network. It is
    info if the fall of the others made most of the lead, and none was there at the start. (2) A
    dominant head, in the first 64 steps, if the model has several output layers side by side. Their gradients meet in
    the layers they share, where the largest decides what is learned. (3) Inputs of another unit: the gradient of a
    layer's weight in units of its bias's is the size of its inputs. The layer must leave almost nothing of the norm, or
    of the gradient of another matrix. (4) A part that outgrows the rest: two or more matrices, each `decades` above
    each of the others, which were within a factor of ten at the start. A weight in the loss that a schedule raises
    without bound does so.

    Source: LeCun et al. 1998, "Efficient BackProp", sec. 4.3 on input scale and 4.7 on learning rates per layer,
    https://doi.org/10.1007/3-540-49430-8_2.

    Args:
        every: Steps between two checks. 10: it is there all the time or not at all.
        decades: Lead over the second largest, in powers of ten. 2.5: the largest lead in healthy runs was 1.1
            (`scripts/studies/false_alarms.py`); planted faults start at 3.
        steps: Newest steps over which the smallest lead counts. 10: a single batch is not an imbalance.
        raw: Norm of all other gradients, in units of a layer's own, if its inputs are `decades` beyond 1 in size. 0.1:
            none of 280 healthy runs had inputs as large and less than 0.3 left, including biases before a
            normalization, whose gradient is rounding.
        own_rate: Rate of the layer's parameter group, in units of the lowest rate of the others, up to which it makes
            up for the imbalance (info). 0.1: rates that differ by less, as of a new head and its backbone, are not set
            for that.
        matrices: Least number of weight matrices for (1) and (4). 3: of two, either may well be the larger one.
        shallow_matrices: Largest number of weight matrices with which the output layer counts too, for (1). 4: in
            deeper networks it leads by nature.
        output_input_size: Size of the output layer's inputs (gradient of its weight over the gradient of its bias)
            below which it does not count, for (1). 0.1: the layers before it lag behind and pass on almost no signal.
        head_steps: Steps from the start in which heads are compared, for (2). 64: later one head may have converged.
        starved: Gradient of another matrix, in units of the layer's own over the size of its inputs, up to which it
            gets almost nothing, for (3). 10: what is left if these inputs dominate a normalization.
        group_size: Least number of matrices in the part, and in the rest, for (4). 2: single ones are compared by (1).
        group_first_decades: Largest distance of the part from the rest at the start, in powers of ten, for (4), and of
            the leader, for (1). 1: a part that led by more from the first step has not outgrown the rest.
        rest_fall_decades: Largest fall of the rest since the start, in powers of ten, for (4). 1: gradients that die in
            the rest are not growth of the part.
    """

    code: ClassVar[str] = "GW107"
    kind: ClassVar[str] = "layer-imbalance"
    every: int = 10
    decades: float = 2.5
    steps: int = 10
    raw: float = 0.1
    own_rate: float = 0.1
    matrices: int = 3
    shallow_matrices: int = 4
    output_input_size: float = 0.1
    head_steps: int = 64
    starved: float = 10.0
    group_size: int = 2
    group_first_decades: float = 1.0
    rest_fall_decades: float = 1.0

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding for the layer that dominates the others."""
        yield from findings_of(self, history, self._signs(history))

    def _signs(self, history: History) -> Iterator[Sign | None]:
        """Yield the observation of each mechanism, in a fixed order."""
        yield find_unscaled_inputs(
            history,
            decades=self.decades,
            steps=self.steps,
            raw=self.raw,
            starved=self.starved,
            own_rate=self.own_rate,
        )
        yield from find_dominant_heads(history, decades=self.decades, steps=self.steps, head_steps=self.head_steps)
        # the rules above do not compare matrices, so they run for any model
        if len(structure_of(history).matrices.indices_M) < self.matrices:
            return
        yield find_leading_matrix(
            history,
            decades=self.decades,
            steps=self.steps,
            matrices=self.matrices,
            shallow_matrices=self.shallow_matrices,
            output_input_size=self.output_input_size,
            own_rate=self.own_rate,
            first_decades=self.group_first_decades,
        )
        yield from find_growing_group(
            history,
            kind=self.kind,
            decades=self.decades,
            steps=self.steps,
            size=self.group_size,
            first_decades=self.group_first_decades,
            rest_fall_decades=self.rest_fall_decades,
        )

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, that stay quiet, and near misses."""
        faulty = Synthetic(steps=40).imbalance(4, factor=1e4)
        yield Example("a layer has raw inputs", faulty.history(), faulty.names(4))
        heads = {"layers.10": 10.0, "layers.11": 11.0}
        tasks = Synthetic(steps=40).imbalance(11, factor=1e4).add_event(HEADS, values=heads)
        yield Example("one of two heads has targets in millimeters", tasks.history(), tasks.names(11))
        even = Synthetic(steps=40).imbalance(11, factor=50).add_event(HEADS, values=heads)
        yield Example("two heads, one with fifty times the gradient", even.history())
        yield Example("days since 1970 are fed to a layer", *make_unscaled_inputs(19_000.0, others=0.05))
        yield Example(
            "days since 1970, and other layers have gradients as well", make_unscaled_inputs(19_000.0, others=0.4)[0]
        )
        yield Example(
            "days since 1970, and one other layer gets next to no gradient",
            *make_unscaled_inputs(19_000.0, others=0.4, least=1e-4),
        )
        yield Example("pixels of 0 to 255", make_unscaled_inputs(150.0, others=0.05)[0])
        yield Example("the weight of a reversed gradient grows tenfold per 20 steps", *make_outgrown(rate=1.12))
        yield Example(
            "the weight of a reversed gradient grows to fifty times and stays there",
            make_outgrown(rate=1.12, most=50.0)[0],
        )
        yield Example("the other layers lose their gradients instead", make_outgrown(rate=1 / 1.12, rest=True)[0])
        yield Example("a healthy run", Synthetic(steps=40).history())
        yield Example(
            "fifty times the others is usual for an output layer",
            Synthetic(steps=40).imbalance(11, factor=50).history(),
        )
        yield Example(
            "a single spike is not an imbalance", Synthetic(steps=41).spike(step=40, factor=1e5, layers=4).history()
        )
        output = Synthetic(steps=40).imbalance(4, factor=1e4)
        output.grad_l2_TL[:, -1] = 3 * output.grad_l2_TL[:, 4]
        yield Example(
            "the output layer has as large a gradient, because of its inputs", output.history(), output.names(4)
        )
        yield Example("vanishing gradients have a second largest", Synthetic(steps=40).vanishing(decades=12).history())
        fallen = Synthetic(steps=60)
        fallen.grad_l2_TL[20:, np.arange(fallen.grad_l2_TL.shape[1]) != 4] /= 1e4
        yield Example("all others fall behind a layer: for information", fallen.history(), fallen.names(4))
        known = Synthetic(steps=40).imbalance(4, factor=1e4).own_rate(4, factor=1e-3)
        yield Example(
            "a layer of another unit has a lower rate of its own: for information", known.history(), known.names(4)
        )
