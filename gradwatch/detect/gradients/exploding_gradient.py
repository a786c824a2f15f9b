"""GW102: gradient norms climb out of everything the run has seen, grow geometrically with depth, or near overflow."""

# T = steps of a window, D = modules that have a weight matrix, input side first

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, final

import numpy as np
from numpy.typing import NDArray

from gradwatch.detect import Example
from gradwatch.detect.features.baseline import beginning
from gradwatch.detect.features.consequences import is_explained
from gradwatch.detect.features.events import noted
from gradwatch.detect.features.finding import finding_of
from gradwatch.detect.features.lr_schedule import SPAN, last_jump
from gradwatch.detect.features.robust_stats import block_medians, climb, log10, median
from gradwatch.detect.features.scope import first_scope, scopes
from gradwatch.detect.features.structure import depth, module_levels, spread, spreads
from gradwatch.detect.features.words import factor
from gradwatch.detect.gradients._unbounded_loss import STEPS, falls_without_end
from gradwatch.events import DERIVATIVE, RECURRENCE
from gradwatch.history.lookahead import Ahead
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.history.table import WINDOW, Floats
from gradwatch.records import Finding, Quantity, Severity

BLOCK = 8
"""Steps per block median: one wild batch, or three, do not make a climb."""

CANCELLED = 1e-5
"""Gradient of the output's bias, in units of its weight's, below which it is rounding error: the loss does not change
where all outputs shift by the same amount, as with a distance between two outputs or a softmax over the batch."""

MOST_OF_IT = 0.7
"""Share of the total norm from which one tensor makes up half of its square, so that the overflow is laid to it."""

OVERFLOW = 1e18
"""Norm above which its square, as in Adam's second moment, leaves float32 (largest 3.4e38, whose root is 1.8e19)."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ExplodingGradient:
    """Gradient norms that climb exponentially, or are far too large already.

    What it measures: six things. (1) A climb: the median of the newest 8 total norms against the largest block median
    in the first half of the window (up to 256 steps), together with the loss: both have to be above all they were
    there, the norm by `factor` and the loss by `loss_factor`, and the loss above its start. (2) A blow-up over depth:
    in each module the size of a gradient element, and by how many decades a line through them rises towards the input,
    the mirror image of vanishing. (3) The gain of the backward pass: the gradient norm of the median weight matrix over
    that of the output layer's bias, which is what the loss itself sends in, whatever its units; not where a loss may be
    made of derivatives by the inputs (a physics-informed network), of which that bias is no part. (4) A norm of 1e18 or
    more, whose square overflows in float32. (5) Where a forward pass uses one parameter on its own result again and
    again, as cells in a loop and solvers of equations do, by how much the gradient grows on its way back. (6) A loss
    that falls below zero faster and faster, both it and the norm `unbounded` times as large as in the first 8 steps and
    still growing, and the weights with them: what has a least value flattens out on its way there.

    Why it matters: steps grow with the norm (under Adam they stay large and lose direction) until the loss is NaN.

    When it is wrong: norms that rise while the loss falls are the end of a plateau and not counted. A curriculum that
    gets harder raises both, by less. A loss that is a value of a game (GAN, policy gradient) may rise for good reasons.

    What to do: clip the gradient norm at the usual level; lower the learning rate, or warm it up; normalise layers;
    scale the initialisation (He for ReLU); bootstrap from a frozen copy in Q-learning. Where a loss falls without end,
    look at its sign, and bound a critic (a penalty on its gradient, spectral norms, clipped weights).

    Source: Pascanu et al. 2013, https://arxiv.org/abs/1211.5063, sec. 2 and 3; He et al. 2015,
    https://arxiv.org/abs/1502.01852, sec. 2.2; Arjovsky et al. 2017, https://arxiv.org/abs/1701.07875, sec. 3, on
    critics that are to be Lipschitz.

    Args:
        every: Steps between two looks. 5: at 1.2 per step a norm grows 2.5 times meanwhile.
        factor: Climb of the norm over the largest block median before. 8: in no healthy run was the norm above its past
            while the loss doubled (`scripts/studies/false_alarms.py`); runaway Q-values pass 8 within 40 steps.
        loss_factor: Climb of the loss over its largest block median before, and over its first 8 steps. 2: harder
            stages of a curriculum raised it by 1.5.
        decades: Rise over depth, in powers of ten. 4: it came to 1.9 in a healthy mixture of experts, whose parallel
            layers have no depth, and to 1.2 in networks that have (`scripts/studies/false_alarms.py`).
        gain: Gain of the backward pass at each of 8 steps, in powers of ten. 2.5: it stayed below 1.8 in healthy runs
            (`scripts/studies/false_alarms.py`); a graph convolution without normalisation by degree has 3.2 over four
            layers.
        recurrence: Growth from the last use of a parameter to its first, in powers of ten, beyond what a loss at
            each of them adds. 3: a loss that counts late steps of a sequence less, as a discount of 0.95 over 100 steps
            does, comes to 2.2.
        modules: Least number of modules with a weight matrix for the rise over depth. 5: fewer make no line.
        unbounded: Growth of a loss below zero, and of the norm, since the first 8 steps. 100: the gradient of a critic
            with a penalty or with spectral norms grows tenfold out of its first weights, and then no more.
    """

    code: ClassVar[str] = "GW102"
    kind: ClassVar[str] = "exploding-gradient"
    every: int = 5
    factor: float = 8.0
    loss_factor: float = 2.0
    decades: float = 4.0
    gain: float = 2.5
    recurrence: float = 3.0
    modules: int = 5
    unbounded: float = 100.0

    def rules_out(self, ahead: Ahead) -> NDArray[np.bool_]:
        """Say at which steps norms are neither steep over depth nor above what they were."""
        norm_D, l2_DL = ahead.scalar("grad_norm.before_clip"), ahead.newest("grad.l2")
        newest_D = np.sort(ahead.scalars("grad_norm.before_clip", BLOCK), axis=1)[:, BLOCK // 2 - 1]
        lowest = np.fmin.reduce(ahead.history.run.ahead("grad_norm.before_clip", before=WINDOW), axis=None)
        is_early_D = ahead.counts_D < 5 * BLOCK
        looks_D = is_early_D | (ahead.steps_D % (2 * self.every) == 0)
        may_D = (norm_D >= OVERFLOW) | (~is_early_D & (newest_D > self.factor * lowest))
        may_D |= (ahead.scalar("loss") < 0) & (ahead.counts_D >= STEPS) & (ahead.steps_D % (2 * self.every) == 0)
        if any(event.kind == RECURRENCE.name for event in ahead.history.events):
            return np.zeros(len(ahead), np.bool_)
        return np.asarray(
            ~(may_D | (looks_D & (self._may_be_steep(ahead.history, l2_DL) | self._may_gain(ahead.history, l2_DL)))),
            np.bool_,
        )

    def _may_be_steep(self, history: History, l2_DL: Floats) -> NDArray[np.bool_]:
        """Say at which steps the ends of the profile over depth are far apart."""
        if len(depth(history).starts_D) < self.modules:
            return np.zeros(len(l2_DL), np.bool_)
        return ~(spreads(history, l2_DL) < 10 ** (self.decades / 2))

    def _may_gain(self, history: History, l2_DL: Floats) -> NDArray[np.bool_]:
        """Say at which steps a weight's gradient is far larger than that of the output's bias."""
        shape = depth(history)
        if shape.output_bias is None or len(shape.matrices_M) < 2:
            return np.zeros(len(l2_DL), np.bool_)
        largest_D = np.fmax.reduce(l2_DL[:, shape.matrices_M], axis=1)
        return np.asarray(l2_DL[:, shape.output_bias] * 10**self.gain < largest_D)

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding for the run, or for the modules that climb while others do not."""
        yield from self._over_time(history)
        yield from self._without_end(history)
        norm_T = history.scalar("grad_norm.before_clip")
        if OVERFLOW <= norm_T[-1] < np.inf:
            yield self._overflow(history, float(norm_T[-1]))
        if len(norm_T) < 5 * BLOCK or history.step % (2 * self.every) == 0:
            yield from self._over_depth(history)
            yield from self._gain(history)
        if len(norm_T) < 5 * BLOCK:
            return
        newest = float(np.sort(norm_T[-BLOCK:])[BLOCK // 2 - 1])
        if not newest > self.factor * np.fmin.reduce(norm_T[: len(norm_T) // 2]):
            return
        half = len(norm_T) // 2
        before = float(np.fmax.reduce(block_medians(norm_T[:half], BLOCK)))
        if newest >= self.factor * before and self._is_loss_rising(history, half):
            yield from self._climb(history, half, newest / before)

    def _is_loss_rising(self, history: History, half: int) -> bool:
        """Say whether the loss has climbed out of what it was in the first half of the window, and above its start."""
        loss_T = history.scalar("loss")
        newest, past = float(median(loss_T[-BLOCK:])), block_medians(loss_T[:half], BLOCK)
        low, high = float(np.fmin.reduce(past)), float(np.fmax.reduce(past))
        first = float(np.fmax.reduce(beginning(history, "loss", BLOCK)))
        if low <= 0:  # without a zero there is no factor: as far above the past as the past is wide
            return newest > high + (self.loss_factor - 1) * (high - low) and newest > first
        return newest > self.loss_factor * max(high, first)

    def _climb(self, history: History, half: int, climb: float) -> Iterator[Finding]:
        l2_TL = history.param.window("grad.l2")
        with np.errstate(divide="ignore", invalid="ignore"):
            ill_L = median(l2_TL[-BLOCK:]) >= self.factor * median(l2_TL[:half])
        is_whole = 2 * np.count_nonzero(ill_L) >= depth(history).num_trainable
        was_told = any(f.kind == self.kind and f.severity == Severity.INFO for f in history.findings)
        has_jumped = last_jump(history.scalar("lr.0", SPAN)) is not None
        is_told = was_told or has_jumped or is_explained(history, self.kind)
        for layer, _ in [(None, [])] if is_whole else scopes(history, ill_L, kind=self.kind):
            whose = f" of {layer}" if layer else ""
            yield finding_of(
                self,
                history,
                f"the gradient norm{whose} has climbed {factor(climb)} times above its past, the loss too",
                Quantity(key="grad_norm.climb", label="climb of grad_norm.before_clip", value=climb),
                Quantity(key="grad_norm.before_clip", value=float(history.scalar("grad_norm.before_clip")[-1])),
                Quantity(key="loss", value=float(history.scalar("loss")[-1])),
                layer=layer,
                severity=Severity.INFO if is_told else Severity.CRITICAL,
            )

    def _over_depth(self, history: History) -> Iterator[Finding]:
        shape = depth(history)
        if (
            len(shape.starts_D) < self.modules
            or history.step < self.every
            or spread(history) < 10 ** (self.decades / 2)
        ):
            return
        level_D = module_levels(history, median(history.param.window("grad.l2", BLOCK)))[:-1]
        places = np.flatnonzero(~np.isnan(level_D))
        if len(places) < self.modules - 1:
            return
        rise = -climb(level_D[places])
        if rise < self.decades:
            return
        layer = first_scope(history, int(shape.chain_K[shape.starts_D[places[0]]]))
        yield finding_of(
            self,
            history,
            f"gradients grow by {rise:.1f} decades on their way back to {layer}",
            Quantity(key="depth.rise_decades", label="rise over depth", value=rise, unit="decades"),
            Quantity(
                key="depth.rise_per_module_decades",
                label="rise per module",
                value=rise / (len(places) - 1),
                unit="decades",
            ),
            Quantity(key="grad_norm.before_clip", value=float(history.run.newest("grad_norm.before_clip")[0])),
            layer=layer,
            severity=Severity.CRITICAL if rise >= 1.5 * self.decades else Severity.WARNING,
        )

    def _over_time(self, history: History) -> Iterator[Finding]:
        """Yield a finding for the parameter through whose uses, one after another, the gradient grows."""
        for event in noted(history, RECURRENCE):
            growth, uses = event.values["growth"], event.values["uses"]
            if growth < self.recurrence:
                continue
            yield finding_of(
                self,
                history,
                f"the gradient grows by {growth:.1f} decades on its way back through {uses:.0f} uses of "
                f"{event.layer}, one after another",
                Quantity(
                    key="recurrence.growth_decades",
                    label="growth from the last use to the first",
                    value=growth,
                    unit="decades",
                ),
                Quantity(
                    key="recurrence.factor_per_use",
                    label="growth at each use",
                    value=10 ** (growth / uses),
                    unit="times",
                ),
                layer=event.layer,
                severity=Severity.CRITICAL if growth >= 2 * self.recurrence else Severity.WARNING,
            )

    def _without_end(self, history: History) -> Iterator[Finding]:
        """Yield a finding where the loss has no least value, and what is trained grows towards it for ever."""
        is_due = history.step % (2 * self.every) == 0 and history.run.newest("loss")[0] < 0
        sign = falls_without_end(history, growth=self.unbounded) if is_due else None
        if sign:
            severity = Severity.INFO if is_explained(history, self.kind) else Severity.CRITICAL
            yield finding_of(self, history, sign.message, *sign.evidence, severity=severity)

    def _gain(self, history: History) -> Iterator[Finding]:
        shape = depth(history)
        matrices_M = shape.moved_M  # what nothing moves comes to no harm
        is_told = any(f.kind == self.kind for f in history.findings)
        if shape.output_bias is None or len(matrices_M) < 2 or is_told or any(noted(history, DERIVATIVE)):
            return
        l2_L = history.param.newest("grad.l2")
        inflow = l2_L[shape.output_bias]
        if not inflow * 10**self.gain < np.fmax.reduce(l2_L[matrices_M]) or len(history.run.steps(BLOCK)) < BLOCK:
            return
        if inflow < CANCELLED * l2_L[matrices_M[-1]]:
            return
        l2_TL = history.param.window("grad.l2", BLOCK)
        gain_T = log10(median(l2_TL[:, matrices_M].T)) - log10(l2_TL[:, shape.output_bias])
        gain = float(gain_T.min())  # nan, with a step without gradient, is not enough
        if not gain >= self.gain:
            return
        layer = first_scope(history, int(matrices_M[np.nanargmax(median(l2_TL[:, matrices_M]))]))
        yield finding_of(
            self,
            history,
            f"the backward pass multiplies what the loss sends in by {factor(10**gain)}, most at {layer}",
            Quantity(key="backward.gain_decades", label="gain of the backward pass", value=gain, unit="decades"),
            Quantity(key="grad.l2.output_bias", label="grad.l2 of the output's bias", value=float(inflow)),
            Quantity(key="grad_norm.before_clip", value=float(history.run.newest("grad_norm.before_clip")[0])),
            layer=layer,
        )

    def _overflow(self, history: History, norm: float) -> Finding:
        l2_L = history.param.newest("grad.l2")
        widest = int(np.nanargmax(l2_L))  # one is there: the total is a number
        layer = first_scope(history, widest) if l2_L[widest] >= MOST_OF_IT * norm else None
        whose = f" of {layer}" if layer else ""
        return finding_of(
            self,
            history,
            f"the gradient norm{whose} is so large that its square overflows in float32",
            Quantity(key="grad_norm.before_clip", value=norm),
            layer=layer,
            severity=Severity.CRITICAL,
        )

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, that stay quiet, and near misses."""
        yield Example(
            "norms and loss climb from step 60", Synthetic(steps=120).exploding(onset=60, rate=1.15).history(), (None,)
        )
        deep = Synthetic(steps=30).vanishing(decades=-8)
        yield Example("gradients grow by eight decades over depth", deep.history(), deep.names(0))
        yield Example("a sum over neighbours multiplies the gradient at each layer", *_amplified(3.2))
        yield Example("the weights' gradients are ten times the output bias's", _amplified(1.0)[0])
        looped = Synthetic(steps=20).note(RECURRENCE, layer="layers.3.weight", values={"uses": 96, "growth": 4.7})
        yield Example("a recurrence multiplies by more than one at each step", looped.history(), ("layers.3.weight",))
        looped = Synthetic(steps=20).note(RECURRENCE, layer="layers.3.weight", values={"uses": 96, "growth": 2.2})
        yield Example("a loss that counts late steps less", looped.history())
        layer = Synthetic(steps=140).exploding(onset=60, rate=1.2, layers=5)
        yield Example("one layer climbs alone", layer.history(), layer.names(5))
        yield Example("a healthy run", Synthetic(steps=140).history())
        plateau = Synthetic(steps=140).exploding(onset=60, rate=1.06)
        plateau.loss_T = Synthetic(steps=140).loss_T
        yield Example("norms rise while the loss falls: a plateau ends", plateau.history())
        noisy = Synthetic(steps=140, noise=1.2)
        yield Example("norms that vary tenfold from batch to batch", noisy.history())
        stage = Synthetic(steps=160)
        stage.grad_l2_TL[80:] *= 3
        stage.loss_T[80:] *= 2.5
        yield Example("a harder stage of a curriculum", stage.history())
        yield Example("a critic that nothing bounds", _falling(power=2.5), (None,))
        yield Example("a critic that grows until its penalty holds it", _falling(power=2.5, held=30))
        yield Example("a bound on information grows out of a small layer", _falling(power=2.5, grown=0.001))
        yield Example("a likelihood of density falls below zero", _falling(power=2.5, norm=0.0))
        yield Example(
            "the residual of a differential equation, to which the output's bias adds nothing",
            _amplified(3.2, by_inputs=True)[0],
        )
        yield Example("one spike", Synthetic(steps=140).spike(step=137, factor=300).history())


def _falling(*, power: float, norm: float = 1.5, held: int = 1000, grown: float = 0.01) -> History:
    """Return a run whose loss falls below zero as a power of time, and with it what it moves, until it is held."""
    made = Synthetic(steps=200)
    time_T = np.minimum(made.t_T, held) + 1.0
    made.loss_T = -0.01 * time_T**power
    made.weight_l2_TL *= 1 + grown * time_T[:, None]
    made.grad_l2_TL *= (time_T**norm / made.signal_T)[:, None]
    return made.history()


def _amplified(decades: float, *, by_inputs: bool = False) -> tuple[History, tuple[str, ...]]:
    """Return a run whose last tensor is the output's bias, with a gradient so far below the others'."""
    made = Synthetic(steps=30)
    bias = replace(made.info.layers[-1], name="layers.10.bias", module="layers.10", shape=(64,))
    made.info = replace(made.info, layers=(*made.info.layers[:-1], bias))
    made.grad_l2_TL[:, -1] = np.median(made.grad_l2_TL[:, :-1], axis=1) * 10**-decades
    made.grad_l2_TL[:, 4] *= 10
    if by_inputs:
        made.note(DERIVATIVE, values={"tensors": 1})
    return made.history(), made.names(4)
