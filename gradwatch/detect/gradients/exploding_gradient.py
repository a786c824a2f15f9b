"""Find gradient norms that climb above all earlier norms, or grow geometrically with depth (GW102)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, final

from gradwatch.detect import Example
from gradwatch.detect.features.finding import Sign, findings_of
from gradwatch.detect.gradients.exploding_gradient_rules.backward_gain import find_backward_gain
from gradwatch.detect.gradients.exploding_gradient_rules.climb import BLOCK_STEPS, NORM, find_climb
from gradwatch.detect.gradients.exploding_gradient_rules.examples import make_falling_loss, make_gain, make_levels
from gradwatch.detect.gradients.exploding_gradient_rules.jumps import find_jumps
from gradwatch.detect.gradients.exploding_gradient_rules.over_depth import find_growth_over_depth
from gradwatch.detect.gradients.exploding_gradient_rules.recurrence import find_growth_over_time
from gradwatch.detect.gradients.exploding_gradient_rules.unbounded_loss import find_unbounded_loss
from gradwatch.events import DEPTHS, DERIVATIVE, OUTPUT_PAIRS, RECURRENCE
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Finding


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ExplodingGradient:
    """Gradient norms that grow exponentially, or are far too large already.

    What it measures: the growth of the gradient norm over time, from the output to the input, and through the steps of
    a recurrence.

    Why it matters: updates grow with the norm until the loss is NaN. With Adam they stay large and lose their
    direction.

    Example: `nn.init.normal_(layer.weight)` in a deep network without normalization; or a loss whose sign is wrong.

    What to do: clip the gradient norm at its usual level. Lower the learning rate, or warm it up. Normalize layers; use
    Kaiming initialization. If the loss is unbounded, check its sign and bound the critic. If the loss jumps, bound the
    divisor from below by a value of its usual size.

    When it is wrong: a harder stage of a curriculum; the loss of a game (GAN, policy gradient). Norms that rise while
    the loss falls do not count.

    How it is detected: (1) A climb: the median of the newest 8 total norms against the largest block median in the
    first half of the window (up to 256 steps). The norm must be above it by `factor`, the loss by `loss_factor`, and
    the loss must be above its start. (2) Growth over depth: the size of a gradient element in each module, and by how
    many orders of magnitude a line through the logarithms rises towards the input. (3) The gain of the backward pass:
    the gradient norm of the median weight matrix over the norm of the output layer's bias, or of those of all heads,
    which is what the loss sends in. It is left out if a loss may be made of derivatives by the inputs (a
    physics-informed network), or compares outputs with each other (metric learning). (4) Growth over time: by how much
    the gradient grows on its way back, if a forward pass uses one parameter on its own result repeatedly. (5) An
    unbounded loss: it falls below zero faster and faster, and the weights grow too. Loss and norm are `unbounded` times
    as large as in the first 8 steps. A loss with a minimum flattens out. (6) Jumps: the larger of absolute loss and
    norm has two levels from the start, `jump` powers of ten apart and almost nothing between them, and jumps up and
    down `num_jumps` times or more, but not in turn: a division by almost 0. Steps at which both are exactly 0 are left
    out.

    Exceptions to the rules: norms that rise while the loss falls are the end of a plateau and do not count. A
    curriculum that gets harder raises both, but by less. A loop that moves on to other data raises the loss in one
    step, and not after it. A loss that is a value of a game (GAN, policy gradient) may rise for good reasons. A climb
    after the learning rate has jumped by `rate_jump` is info.

    Source: Pascanu et al. 2013, https://arxiv.org/abs/1211.5063, sec. 2 and 3; He et al. 2015,
    https://arxiv.org/abs/1502.01852, sec. 2.2; Arjovsky et al. 2017, https://arxiv.org/abs/1701.07875, sec. 3, on
    critics that must be Lipschitz.

    Args:
        every: Steps between two checks. 5: at 1.2 per step a norm grows 2.5 times in between.
        factor: Climb of the norm over the largest block median before. 8: in no healthy run was the norm above its past
            while the loss doubled (`scripts/studies/false_alarms.py`); runaway Q-values pass 8 within 40 steps.
        loss_factor: Climb of the loss over its largest block median before, and over its first 8 steps. 2: harder
            stages of a curriculum raised it by 1.5.
        decades: Rise over depth, in powers of ten. 4: it came to 1.9 in a healthy mixture of experts, whose parallel
            layers have no depth, and to 1.2 in networks that have (`scripts/studies/false_alarms.py`).
        gain: Gain of the backward pass at each of 8 steps, in powers of ten. 2.5: it stayed below 1.8 in healthy runs
            (`scripts/studies/false_alarms.py`); a graph convolution without normalization by degree has 3.2 over four
            layers.
        recurrence: Growth from the last use of a parameter to its first, in powers of ten. 3: a loss at each use adds
            to the growth, and with a discount of 0.95 over 100 steps it comes to 2.2.
        modules: Least number of modules with a weight matrix for the rise over depth. 5: fewer make no line.
        unbounded: Growth of a loss below zero, and of the norm, since the first 8 steps. 100: the gradient of a critic
            with a penalty or with spectral norms grows tenfold out of its first weights, and then no more.
        jump: Distance of two levels of loss and norm, in powers of ten. 4: tasks of different scale that take turns
            differ by 3, and an epsilon of 1e-6 makes 5 or more.
        climb_blocks: Least number of blocks of 8 steps, for (1). 5: a shorter run has no past to compare with.
        rate_jump: Rise of the learning rate above its earlier values, as a factor, that explains a climb, for (1). 3:
            milestones fall, and warm-ups rise in small steps.
        critical_rise: Rise over depth, in units of `decades`, that is critical, for (2). 1.5: six powers of ten,
            near the resolution of float32 (2^-24 = 6e-8).
        cancelled: Gradient of the output's bias over the gradient of its weight, below which it is rounding error, for
            (3). 1e-5: with a distance between two outputs as the loss, a shift of both cancels out.
        critical_growth: Growth over time, in units of `recurrence`, that is critical, for (4). 2: six powers of ten, as
            for (2).
        unbounded_steps: Least number of steps, for (5). 64: earlier, a fall that gets faster may end a plateau.
        acceleration: Fall of the loss in the second half of the window over the fall in the first half, and growth of
            the norm between the halves, for (5). 2: a straight line has 1, and a loss that nears a bound has less.
        weight_growth: Size of the median weight matrix over its first size, for (5). 1.5: a model that leaves a saddle
            grows from one small layer, and the other layers keep their size.
        num_jumps: Jumps up, and down, and steps at each level, at least, for (6). 4: single bad batches are spikes.
        jump_gap_frac: Width of the empty range between the levels, as a fraction of their distance, for (6). 0.5: sizes
            with a heavy tail fill that range, as the losses of single samples that a model knows or does not know.
        jump_period_steps: Longest period of two kinds of batches in turn, which are left out, for (6). 4: a divisor
            that is almost 0 has no period.
        jump_start_sizes: First sizes, without zeros, that must hold both levels, for (6). 32: batches with almost
            nothing left to learn come later.
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
    jump: float = 4.0
    climb_blocks: int = 5
    rate_jump: float = 3.0
    critical_rise: float = 1.5
    cancelled: float = 1e-5
    critical_growth: float = 2.0
    unbounded_steps: int = 64
    acceleration: float = 2.0
    weight_growth: float = 1.5
    num_jumps: int = 4
    jump_gap_frac: float = 0.5
    jump_period_steps: int = 4
    jump_start_sizes: int = 32

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding for the run, or for the modules that climb while others do not."""
        yield from findings_of(self, history, self._signs(history))

    def _signs(self, history: History) -> Iterator[Sign | None]:
        """Yield the observation of each mechanism, in a fixed order."""
        norm_T = history.scalar(NORM)
        # the costly mechanisms run at every second call, but at each call while the run is young
        is_early, is_due = len(norm_T) < self.climb_blocks * BLOCK_STEPS, history.step % (2 * self.every) == 0
        yield from find_growth_over_time(history, decades=self.recurrence, critical_growth=self.critical_growth)
        if is_due:
            yield find_unbounded_loss(
                history,
                kind=self.kind,
                growth=self.unbounded,
                steps=self.unbounded_steps,
                acceleration=self.acceleration,
                weight_growth=self.weight_growth,
            )
        yield find_jumps(
            history,
            norm_T,
            kind=self.kind,
            decades=self.jump,
            num_jumps=self.num_jumps,
            gap_frac=self.jump_gap_frac,
            period_steps=self.jump_period_steps,
            start_sizes=self.jump_start_sizes,
        )
        if is_early or is_due:
            if history.step >= self.every:
                yield find_growth_over_depth(
                    history, modules=self.modules, decades=self.decades, critical_rise=self.critical_rise
                )
            yield find_backward_gain(history, kind=self.kind, decades=self.gain, cancelled=self.cancelled)
        yield from find_climb(
            history,
            norm_T,
            kind=self.kind,
            factor=self.factor,
            loss_factor=self.loss_factor,
            blocks=self.climb_blocks,
            rate_jump=self.rate_jump,
        )

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, that stay quiet, and near misses."""
        yield Example(
            "norms and loss climb from step 60", Synthetic(steps=120).exploding(onset=60, rate=1.15).history(), (None,)
        )
        deep = Synthetic(steps=30).vanishing(decades=-8)
        yield Example("gradients grow 1e8-fold over depth", deep.history(), deep.names(0))
        beside = Synthetic(steps=30).vanishing(decades=-8)
        depths = {layer.name: 3.0 - i % 3 for i, layer in enumerate(beside.info.layers)}
        yield Example("parallel parts of three layers", beside.add_event(DEPTHS, values=depths).history())
        yield Example("a sum over neighbors multiplies the gradient at each layer", *make_gain(3.2))
        yield Example("the weights' gradients are ten times the output bias's", make_gain(1.0)[0])
        yield Example("one of two heads has learned its task", make_gain(3.2, other_head=True)[0])
        yield Example("a loss of distances between outputs", make_gain(3.2, event=OUTPUT_PAIRS)[0])
        looped = Synthetic(steps=20).add_event(RECURRENCE, layer="layers.3.weight", values={"uses": 96, "growth": 4.7})
        yield Example("a recurrence multiplies by more than one at each step", looped.history(), ("layers.3.weight",))
        looped = Synthetic(steps=20).add_event(RECURRENCE, layer="layers.3.weight", values={"uses": 96, "growth": 2.2})
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
        data = Synthetic(steps=160)
        data.grad_l2_TL[80:] *= 100
        data.loss_T[:80], data.loss_T[80:] = 0.5, 1.5
        yield Example("a converged model goes on to other data", data.history())
        yield Example("a critic that nothing bounds", make_falling_loss(), (None,))
        yield Example("a critic that grows until its penalty holds it", make_falling_loss(held=30))
        yield Example("a bound on information grows out of a small layer", make_falling_loss(grown=0.001))
        yield Example("a likelihood of density falls below zero", make_falling_loss(norm=0.0))
        yield Example("advantages divided by a deviation that is often 0", make_levels(1e5), (None,))
        yield Example("the same, clipped before the norm is read", make_levels(1e5, clipped=True), (None,))
        yield Example("tasks with losses of different scale take turns", make_levels(1e3))
        yield Example("tasks in turn whose losses are farther apart", make_levels(1e5, in_turn=True))
        yield Example("rewards are sparse: most losses are exactly 0", make_levels(1e5, low=0.0))
        yield Example("rewards are sparse: most losses are an entropy bonus", make_levels(1.0, low=1e-3))
        yield Example(
            "the residual of a differential equation, to which the output's bias adds nothing",
            make_gain(3.2, event=DERIVATIVE)[0],
        )
        yield Example("one spike", Synthetic(steps=140).spike(step=137, factor=300).history())
