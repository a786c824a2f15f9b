"""GW104: the zero fraction of a layer's gradient creeps up for good, as units die one by one."""

# T = steps of a window, B = blocks of it, L = parameter tensors

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, final

import numpy as np
from numpy.typing import NDArray

from gradwatch.detect import Example
from gradwatch.detect.features.baseline import first_steps, is_learned
from gradwatch.detect.features.consequences import severity_after
from gradwatch.detect.features.finding import finding_of
from gradwatch.detect.features.scope import affected_modules
from gradwatch.detect.features.silent_units import DEAD_SIDE_ACTIVATIONS, most_silent, silent_units
from gradwatch.detect.features.structure import structure_of
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Finding, Quantity, Severity

BLOCK_STEPS = 16
"""Steps per block, of which the smallest zero fraction counts: a unit that is zero in every batch is dead, not
selective."""

MAX_SAMPLED_STEPS = 64
"""Sampled steps to look at: 640 steps, if every tenth is sampled."""

MIN_SHARED_ZEROS = 0.9
"""Zeros of a layer's weights in units of its bias's from which its units are silent: the weights then have as many."""

CODEBOOK_EVENT = "tape-codebook"
"""Event of a table of codes, each of which stands for the inputs it is nearest to."""

MIN_RECENT_RISE = 0.03
"""Rise over the newest third that shows that it goes on: three in a hundred units."""

MIN_CREEP_FRAC, MAX_CREEP_FRAC = 0.2, 0.8
"""Parts of the rise between which an envelope is rising."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RisingSparsity:
    """A gradient that gets sparser and sparser.

    What it measures: the fraction of exact zeros in a gradient, as the smallest value of blocks of 16 steps. This lower
    envelope does not see selective units. It is read where one element stands for one unit: in the bias, or in the
    weight of a module without a bias. It has to rise by `rise` since the first steps, in nearly all blocks of the
    window, and to be still rising in its newest third (or half, if most is gone). The same is measured for the fraction
    of units of a ReLU that fire for no sample, at the sampled steps: with a penalty in the loss no gradient is exactly
    zero. A bias counts only if its weights have as many zeros, because a loss that is a difference gives it none where
    both sides answer alike. An embedding counts only if its rows are codes, which the model chooses; which words a
    batch holds is a matter of the data.

    Why it matters: a unit that falls silent for every batch has no gradient and stays silent. The loss does not show it
    until little capacity is left.

    When it is wrong: magnitude pruning makes zeros on purpose. A hinge or triplet loss has zeros for satisfied samples;
    they come and go, and the envelope does not climb steadily. A network that settles in its first steps loses some
    units at once and then no more. If next to nothing of the first loss is left, it does no harm (info).

    What to do: weaken what pushes units down (an L1 penalty, weight decay on biases, a learning rate too high),
    resample dead units, or use LeakyReLU or GELU. Move unused codes next to encoded inputs, or let codes follow their
    inputs by a running mean.

    Source: Bricken et al. 2023, "Towards monosemanticity", on neurons that die over a training,
    https://transformer-circuits.pub/2023/monosemantic-features; Lu et al. 2020, https://arxiv.org/abs/1903.06733;
    Dhariwal et al. 2020, https://arxiv.org/abs/2005.00341, sec. 3.1, on codes.

    Args:
        every: Steps between two checks. 10: a slow rise can wait.
        rise: Rise of the envelope since the first 16 steps, 0..1. 0.35: a third of the units; the envelopes of healthy
            runs that rose as steadily rose by 0.3 at most.
        level: Envelope, 0..1, that must be reached. 0.35: below, it is within what healthy layers have.
        steady: Fraction of pairs of blocks, 0..1, of which the later must be the higher. 0.85: Kendall's tau of 0.7,
            which 6 blocks without trend reach once in 36 tensors and 10 blocks once in 900.
        blocks: Least number of blocks. 6: fewer make no trend.
        creeping: Blocks of the window between a fifth and four fifths of the rise. 5: envelopes of healthy runs that
            rose by 0.35 to 0.5 took 3 at most.
        most: Envelope, 0..1, at which it need not creep. 0.75: half of the units do not fire for random inputs, and
            half of the others are gone.
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

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding for each module whose gradient gets sparser."""
        if history.step < self.blocks * BLOCK_STEPS:
            return
        yield from self._of_gradients(history)
        yield from self._of_units(history)

    def _of_gradients(self, history: History) -> Iterator[Finding]:
        """Yield a finding for each module whose gradient gets sparser."""
        newest_L = history.param.newest("grad.zero_frac")
        maybe_L = (newest_L >= self.level) & (newest_L < 1) & _units(history)
        if not maybe_L.any():
            return
        zero_TL = history.param.window("grad.zero_frac")
        first_L = first_steps(history, "grad.zero_frac", BLOCK_STEPS).min(axis=0)
        low_L = zero_TL[-BLOCK_STEPS:].min(axis=0)
        maybe_L &= self._is_high(low_L, first_L)
        maybe_L[[i for i in np.flatnonzero(maybe_L) if _is_cancelled(history, int(i), low_L)]] = False
        if not maybe_L.any():
            return
        maybe = np.flatnonzero(maybe_L)
        first_L = first_L[maybe]
        whole = len(zero_TL) // BLOCK_STEPS
        low_BL = zero_TL[len(zero_TL) - whole * BLOCK_STEPS :, maybe].reshape(whole, BLOCK_STEPS, -1).min(axis=1)
        ill_L = np.zeros(len(newest_L), np.bool_)
        ill_L[maybe] = self._is_rising(low_BL) & self._is_creeping(low_BL, first_L)
        for layer, group in affected_modules(history, ill_L, kind=self.kind):
            mine = np.isin(maybe, group)
            yield self._finding(history, layer, low_BL[:, mine], rise=float((low_BL[-1] - first_L)[mine].max()))

    def _of_units(self, history: History) -> Iterator[Finding]:
        """Yield a finding for each ReLU whose units fall silent, unless a gradient has shown it before."""
        if not history.info.activations or any(f.kind == self.kind for f in history.findings):
            return
        steps_T = history.act.steps(MAX_SAMPLED_STEPS)
        if len(steps_T) < self.blocks or not np.fmax.reduce(history.act.newest("act.dead_frac")) >= self.level:
            return
        ends_T = np.flatnonzero(
            steps_T[1:] // BLOCK_STEPS > steps_T[:-1] // BLOCK_STEPS
        )  # the last sample of each block of steps
        dead_TA = history.act.window("act.dead_frac", MAX_SAMPLED_STEPS)
        low_BA = np.minimum.reduceat(dead_TA, np.concatenate([[0], ends_T + 1]), axis=0)[:-1]  # the newest is not whole
        if len(low_BA) < self.blocks:
            return
        first_A = first_steps(history, "act.dead_frac", 2).min(axis=0)
        if not self._is_high(low_BA[-1], first_A).any():
            return
        with np.errstate(invalid="ignore", divide="ignore"):
            ill_A = self._is_high(low_BA[-1], first_A) & self._is_rising(low_BA) & self._is_creeping(low_BA, first_A)
        for a in np.flatnonzero(ill_A).tolist():
            if history.info.activations[a].module_type in DEAD_SIDE_ACTIVATIONS:
                yield self._silencing(history, a, before=float(first_A[a]), now=float(low_BA[-1, a]))

    def _silencing(self, history: History, activation: int, *, before: float, now: float) -> Finding:
        layer = history.info.activations[activation].name
        silent = silent_units(history, activation)
        return finding_of(
            self,
            history,
            f"units of {layer} fall silent one by one: {100 * now:.0f} % fire for no sample",
            Quantity(key="act.dead_frac", value=now, unit="0..1"),
            Quantity(key="act.dead_frac.before", label="act.dead_frac of the first samples", value=before, unit="0..1"),
            *((silent.quantity(),) if silent else ()),
            layer=layer,
            severity=Severity.INFO if is_learned(history) else severity_after(history, self.kind),
        )

    def _is_high(self, low_L: NDArray[np.floating], first_L: NDArray[np.floating]) -> NDArray[np.bool_]:
        """Return of which tensors the lower envelope is far above where it began."""
        is_high_L: NDArray[np.bool_] = (low_L >= self.level) & (low_L - first_L >= self.rise)
        return is_high_L

    def _is_rising(self, low_BL: NDArray[np.floating]) -> NDArray[np.bool_]:
        """Return of which tensors the lower envelope rises steadily and still does."""
        earlier, later = np.triu_indices(len(low_BL), 1)
        steady_L = (low_BL[later] > low_BL[earlier]).mean(axis=0)
        third, half = (low_BL[-1] - low_BL[-max(2, len(low_BL) // part)] for part in (3, 2))
        recent_L = np.where(low_BL[-1] >= self.most, half, third)  # an envelope near 1 has little left to rise
        is_rising_L: NDArray[np.bool_] = (steady_L >= self.steady) & (recent_L >= MIN_RECENT_RISE)
        return is_rising_L

    def _is_creeping(self, low_BL: NDArray[np.floating], first_L: NDArray[np.floating]) -> NDArray[np.bool_]:
        """Return of which tensors the lower envelope took its time, or left hardly a unit."""
        part_BL = (low_BL - first_L) / (low_BL[-1] - first_L)
        is_slow_L = np.count_nonzero((part_BL > MIN_CREEP_FRAC) & (part_BL < MAX_CREEP_FRAC), axis=0) >= self.creeping
        is_creeping_L: NDArray[np.bool_] = is_slow_L | (low_BL[-1] >= self.most)
        return is_creeping_L

    def _finding(self, history: History, layer: str | None, low_BL: NDArray[np.floating], *, rise: float) -> Finding:
        low_B = low_BL.mean(axis=1)
        percent = 100 * low_B[-1]
        quietest = most_silent(history)
        silent = None if quietest is None else silent_units(history, quietest)
        return finding_of(
            self,
            history,
            f"the gradient of {layer or 'the whole model'} gets sparser: {percent:.0f} % are always zero",
            Quantity(key="grad.zero_frac", value=float(low_B[-1]), unit="0..1"),
            Quantity(key="zero_frac.rise", label="rise since the first 16 steps", value=rise, unit="0..1"),
            Quantity(
                key="grad.zero_frac.before",
                label=f"grad.zero_frac {BLOCK_STEPS * (len(low_B) - 1)} steps before",
                value=float(low_B[0]),
                unit="0..1",
            ),
            *((silent.quantity(),) if silent else ()),
            layer=layer,
            severity=Severity.INFO if is_learned(history) else severity_after(history, self.kind),
        )

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, that stay quiet, and near misses."""
        sick = Synthetic(steps=200).rising_sparsity(6, onset=10, rate=0.004)
        yield Example("units die one by one", sick.history(), sick.names(6))
        yield Example(
            "units die one by one under a penalty that leaves no gradient at zero", _silenced(0.004), ("acts.1",)
        )
        yield Example("half of the units of a ReLU fall silent together", _silenced(0.02, most=0.5))
        yield Example("a ReLU is as selective as the batch wants it", _silenced(0.002, wave=0.3))
        yield Example("a healthy run", Synthetic(steps=200).history())
        early = Synthetic(steps=200).rising_sparsity(6, onset=0, rate=0.02, most=0.5)
        yield Example("a layer settles within its first steps", early.history())
        places = Synthetic(steps=200).rising_sparsity(6, onset=40, rate=0.006, most=0.5)
        yield Example("half of the units fall silent within eighty steps", places.history())
        gone = Synthetic(steps=200).rising_sparsity(6, onset=40, rate=0.008)
        yield Example("nearly all units fall silent within a hundred", gone.history(), gone.names(6))
        yield Example("a bias gets as much from either side of a difference", _biased(cancels=True))
        yield Example("units die with their bias", _biased(cancels=False), ("layers.6.bias",))
        codes = Synthetic(steps=200).sparse_embedding(6, zero_frac=0).rising_sparsity(6, onset=10, rate=0.004)
        codes.note(CODEBOOK_EVENT, layer="layers.6.weight")
        yield Example("codes fall out of use one by one", codes.history(), codes.names(6))
        words = Synthetic(steps=200).sparse_embedding(6, zero_frac=0).rising_sparsity(6, onset=10, rate=0.004)
        yield Example("batches hold fewer and fewer words", words.history())
        few = Synthetic(steps=200).sparse_embedding(6, zero_frac=0.6)
        few.note(CODEBOOK_EVENT, layer="layers.6.weight")
        yield Example("most codes are out of use from the first", few.history())
        hinge = Synthetic(steps=240).rising_sparsity(6, onset=20, rate=0.002)
        hinge.zero_frac_TL[:, 6] = np.clip(hinge.zero_frac_TL[:, 6] + 0.3 * np.sin(hinge.t_T / 15), 0, 0.95)
        yield Example("zeros come and go", hinge.history())
        yield Example(
            "a quarter of an embedding is never looked up",
            Synthetic(steps=200).rising_sparsity(6, onset=-1000, most=0.9).history(),
        )


def _units(history: History) -> NDArray[np.bool_]:
    """Return of which tensors an element, or a row of a table of codes, stands for one unit."""
    codes = {event.layer for event in history.events if event.kind == CODEBOOK_EVENT}
    if not codes:
        return structure_of(history).is_per_unit_L
    return structure_of(history).is_per_unit_L | np.array(
        [layer.name in codes for layer in history.info.layers], np.bool_
    )


def _biased(*, cancels: bool) -> History:
    """Return a run in which the gradient of a bias gets sparser, with or without that of its weights."""
    made = Synthetic(steps=200).rising_sparsity(7, onset=10, rate=0.004)
    weight = made.info.layers[6]
    bias = replace(weight, name="layers.6.bias", shape=weight.shape[:1])
    made.info = replace(made.info, layers=(*made.info.layers[:7], bias, *made.info.layers[8:]))
    if not cancels:
        made.rising_sparsity(6, onset=10, rate=0.004)
    return made.history()


def _is_cancelled(history: History, tensor: int, zero_L: NDArray[np.floating]) -> bool:
    """Return whether a bias has zeros that its weights do not have: its gradient cancels out, and its units live."""
    own = history.info.layers[tensor]
    mates = [i for i, la in enumerate(history.info.layers) if la.module == own.module and len(la.shape) >= 2]
    if len(own.shape) != 1 or not mates:
        return False
    return bool(zero_L[mates].max() < MIN_SHARED_ZEROS * zero_L[tensor])


def _silenced(rate: float, *, most: float = 0.9, wave: float = 0.0) -> History:
    """Return a run in which a part of the units of a ReLU falls silent per step from step 20, on top of a wave."""
    made = Synthetic(steps=240, activations=3)
    dead_T = 0.02 + rate * np.maximum(made.t_T - 20, 0) + wave * (1 + np.sin(made.t_T / 15))
    made.dead_frac_TA[:, 1] = np.minimum(dead_T, most)
    return made.history()
