"""Find a layer with a gradient that permanently gets sparser, as units die one by one (GW104)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from gradwatch.detect import Example
from gradwatch.detect.features.finding import findings_of
from gradwatch.detect.gradients.rising_sparsity_rules.envelope import BLOCK_STEPS, CreepBounds
from gradwatch.detect.gradients.rising_sparsity_rules.examples import make_settled, make_silenced, make_with_bias
from gradwatch.detect.gradients.rising_sparsity_rules.silencing_units import find_silencing_units
from gradwatch.detect.gradients.rising_sparsity_rules.zero_gradients import find_sparser_gradients
from gradwatch.events import CODEBOOK
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Finding


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RisingSparsity:
    """A gradient with more and more zeros.

    What it measures: the fraction of exact zeros in each gradient, and of dead units in each ReLU, as it rises over the
    run.

    Why it matters: a unit that is zero for every batch gets no gradient and stays dead. The loss shows it only when
    little capacity is left.

    Example: `loss + 10 * hidden.abs().sum()`, an L1 penalty that pushes units to zero.

    What to do: weaken the L1 penalty, the weight decay of biases or the learning rate. Use LeakyReLU or GELU, or reset
    dead units. For codes of a vector quantizer, reset unused codes to encoded inputs.

    When it is wrong: magnitude pruning; hinge or triplet losses, whose zeros come and go; a network that settles in its
    first steps. If little loss is left: info.

    How it is detected: the fraction of exact zeros in a gradient, as the smallest value of blocks of 16 steps. This
    lower envelope does not see selective units. It is read where one element stands for one unit: in the bias, or in
    the weight of a module without a bias. It has to rise by `rise` since the second half of the first block, by which a
    layer that settles at once has done so, and in nearly all blocks of the window. It must still rise in the newest
    third, or half if most is gone. The same is measured for the fraction of units of a ReLU that are zero for every
    sample, at the sampled steps: with a penalty in the loss no gradient is exactly zero. A bias counts only if its
    weights have as many zeros. A loss that is a difference gives a bias no gradient where both sides answer alike. An
    embedding counts only if its rows are codes, which the model chooses; which words a batch holds is a matter of the
    data.

    Source: Bricken et al. 2023, "Towards monosemanticity", on neurons that die over a training,
    https://transformer-circuits.pub/2023/monosemantic-features; Lu et al. 2020, https://arxiv.org/abs/1903.06733;
    Dhariwal et al. 2020, https://arxiv.org/abs/2005.00341, sec. 3.1, on codes.

    Args:
        every: Steps between two checks. 10: a slow rise can wait.
        rise: Rise of the envelope since steps 8 to 15, 0..1. 0.35: a third of the units; the envelopes of healthy runs
            that rose as steadily rose by 0.3 at most.
        level: Envelope, 0..1, that must be reached. 0.35: below, it is within what healthy layers have.
        steady: Fraction of pairs of blocks, 0..1, in which the later must be the higher. 0.85: Kendall's tau of 0.7,
            which 6 blocks without trend reach once in 36 tensors and 10 blocks once in 900.
        blocks: Least number of blocks. 6: fewer make no trend.
        creeping: Blocks of the window between a fifth and four fifths of the rise. 5: envelopes of healthy runs that
            rose by 0.35 to 0.5 took 3 at most.
        most: Envelope, 0..1, at which it need not creep. 0.75: half of the units do not fire for random inputs, and
            half of the others are gone.
        recent_rise: Rise of the envelope, 0..1, in the newest third of the window, or half once `most` is reached.
            0.03: with 3 in 100 units the rise continues.
        creep_margin: Share of the rise, 0..1, at its start and at its end that does not count for `creeping`. 0.2:
            blocks before and after a jump are that close to the ends.
        shared_zeros: Zeros of a layer's weights, in units of the zeros of its bias, at which the bias counts. 0.9: the
            weights of a silent unit have no gradient either.
        left: Loss, in units of the median of the first 16 steps, below which dead units do no harm (info). 0.02: little
            is left to learn.
    """

    code: ClassVar[str] = "GW104"
    kind: ClassVar[str] = "rising-sparsity"
    every: int = 10
    rise: float = 0.35
    level: float = 0.35
    steady: float = 0.85
    blocks: int = 6
    creeping: int = 5
    most: float = 0.75
    recent_rise: float = 0.03
    creep_margin: float = 0.2
    shared_zeros: float = 0.9
    left: float = 0.02

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding for each module with a sparser gradient, and for each ReLU with units that fall silent."""
        if not self.can_judge(history):
            return
        bounds = CreepBounds(
            rise=self.rise,
            level=self.level,
            steady=self.steady,
            creeping=self.creeping,
            most=self.most,
            recent_rise=self.recent_rise,
            creep_margin=self.creep_margin,
            left=self.left,
        )
        zeros = find_sparser_gradients(history, bounds, kind=self.kind, shared_zeros=self.shared_zeros)
        yield from findings_of(self, history, zeros)
        units = find_silencing_units(history, bounds, kind=self.kind, blocks=self.blocks)
        yield from findings_of(self, history, units)

    def can_judge(self, history: History) -> bool:
        """Return whether the run has enough blocks for a trend."""
        return history.step >= self.blocks * BLOCK_STEPS

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, that stay quiet, and near misses."""
        faulty = Synthetic(steps=200).rising_sparsity(6, onset=10, rate=0.004)
        yield Example("units die one by one", faulty.history(), faulty.names(6))
        yield Example(
            "units die one by one under a penalty, which leaves no gradient at zero", make_silenced(0.004), ("acts.1",)
        )
        yield Example("half of the units of a ReLU fall silent together", make_silenced(0.02, most=0.5))
        yield Example("the units of a ReLU are selective in waves", make_silenced(0.002, wave=0.3))
        yield Example("a healthy run", Synthetic(steps=200).history())
        early = Synthetic(steps=200).rising_sparsity(6, onset=0, rate=0.02, most=0.5)
        yield Example("a layer settles within its first steps", early.history())
        yield Example("a layer settles, and then its units get more selective", make_settled())
        places = Synthetic(steps=200).rising_sparsity(6, onset=40, rate=0.006, most=0.5)
        yield Example("half of the units fall silent within eighty steps", places.history())
        gone = Synthetic(steps=200).rising_sparsity(6, onset=40, rate=0.008)
        yield Example("nearly all units fall silent within a hundred steps", gone.history(), gone.names(6))
        yield Example(
            "the gradient of a bias cancels out between the two sides of a difference", make_with_bias(cancels=True)
        )
        yield Example("units die with their bias", make_with_bias(cancels=False), ("layers.6.bias",))
        codes = Synthetic(steps=200).sparse_embedding(6, zero_frac=0).rising_sparsity(6, onset=10, rate=0.004)
        codes.add_event(CODEBOOK, layer="layers.6.weight")
        yield Example("codes fall out of use one by one", codes.history(), codes.names(6))
        words = Synthetic(steps=200).sparse_embedding(6, zero_frac=0).rising_sparsity(6, onset=10, rate=0.004)
        yield Example("batches hold fewer and fewer words", words.history())
        few = Synthetic(steps=200).sparse_embedding(6, zero_frac=0.6)
        few.add_event(CODEBOOK, layer="layers.6.weight")
        yield Example("most codes are out of use from the start", few.history())
        hinge = Synthetic(steps=240).rising_sparsity(6, onset=20, rate=0.002)
        hinge.zero_frac_TL[:, 6] = np.clip(hinge.zero_frac_TL[:, 6] + 0.3 * np.sin(hinge.t_T / 15), 0, 0.95)
        yield Example("zeros come and go", hinge.history())
        yield Example(
            "a quarter of an embedding is never looked up",
            Synthetic(steps=200).rising_sparsity(6, onset=-1000, most=0.9).history(),
        )
