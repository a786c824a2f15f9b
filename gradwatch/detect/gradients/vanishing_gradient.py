"""Find gradients that shrink geometrically towards the input, so that early layers barely learn (GW101)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, final

from gradwatch.detect import Example, Recovery
from gradwatch.detect.features.finding import Sign, findings_of, format_fold
from gradwatch.detect.features.recovery import fall_of_loss
from gradwatch.detect.gradients.vanishing_gradient_rules.examples import make_forgetful, make_gated, make_in_turn
from gradwatch.detect.gradients.vanishing_gradient_rules.over_depth import (
    PER_MODULE,
    fall_over_depth,
    find_fall_over_depth,
)
from gradwatch.detect.gradients.vanishing_gradient_rules.padding import PADDING, find_fall_from_padding
from gradwatch.detect.gradients.vanishing_gradient_rules.recurrence import find_fall_over_time
from gradwatch.events import DEPTHS, HEADS, PADDING_READ, TOWERS
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Finding


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class VanishingGradient:
    """Gradients that shrink from layer to layer towards the input.

    What it measures: the gradient size of each layer from the output to the input, through the steps of a recurrence,
    and at the padding and the tokens of a sequence.

    Why it matters: all layers build on the first layers, which hardly change. Adam rescales small gradients, but not
    below its eps (1e-8).

    Example: `nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Sigmoid()) for _ in range(30)])`.

    What to do: use ReLU, GELU or SiLU instead of sigmoid and tanh; residual connections; batch or layer normalization;
    Xavier initialization for tanh and Kaiming initialization for ReLU.

    When it is wrong: parallel layers that share earlier ones have no single depth. Gradients that shrink in all layers
    alike (convergence) or at one place (dead-layer) do not count.

    When it is withdrawn: the loss has clearly fallen, by a tenth or more, and for (1) the fall over depth is below
    `decades`. (2) is not withdrawn.

    How it is detected: (1) A fall over depth: the size of a gradient element (root mean square) in each module with a
    weight matrix, as median over 10 steps. A line through the logarithms falls towards the input by some orders of
    magnitude. The output layer is left out, because its elements are the largest by nature. The line has to explain
    three quarters of the variance, and no single step between two modules may hold most of the fall. The same is done
    over blocks, each by its largest module, because a gate may get far less than the filter next to it; not if the
    model has several heads. (2) A fall over time, if a forward pass uses one parameter on its own result repeatedly:
    from the last use to the first, once a plateau of the loss was found. (3) A fall from the padding of a sequence to
    its tokens, by `critical_decades`; by `at_once` if the loss has not fallen after `healing_steps`; or by less once a
    plateau was found: a recurrent layer is read at the end of a padded sequence, where it has forgotten the tokens.
    Padding is a token, or zeros, at the end of sequences of different lengths.

    Exceptions to the rules: parts of the model that share no layer have a line each, if each has several layers, and so
    do models that are trained in turn. Other parallel layers have no single depth; the line follows the order in which
    the modules were made. A run that converges shrinks everywhere alike and keeps its profile. A cliff is a dead layer
    or a cut graph, and is not counted.

    Source: Hochreiter 1991; Glorot & Bengio 2010, fig. 2 and 3, https://proceedings.mlr.press/v9/glorot10a.html.

    Args:
        every: Steps between two checks. 10: the profile of a network changes slowly.
        decades: Fall in powers of ten at which to report if the loss has not fallen by a tenth after 50 steps
            (`stuck_frac`, `healing_steps`). 2.5: four sigmoid layers in default initialization lose 2.7; healthy runs
            stay within 2.2 (`scripts/studies/false_alarms.py`).
        at_once: The same without waiting for the loss. 4: what SiLU or tanh lose over six layers of default
            initialization (2.2) heals within 30 steps; seven sigmoid layers lose 5.2 and never learn.
        modules: Least number of modules with a weight matrix, with the output layer. 5: fewer make no line.
        critical_decades: Fall over depth, in powers of ten, that is critical. 6: a common learning rate moves the first
            layers by less than float32 resolves (2^-24 = 6e-8).
        healing_steps: Steps after which the loss is looked at for `decades`. 50: a mild fall from the initialization
            is gone by then if it heals.
        stuck_frac: Fraction of the first loss, 0..1, above which the loss has not fallen. 0.9: a tenth of the loss is
            a clear fall.
    """

    code: ClassVar[str] = "GW101"
    kind: ClassVar[str] = "vanishing-gradient"
    every: int = 10
    decades: float = 2.5
    at_once: float = 4.0
    modules: int = 5
    critical_decades: float = 6.0
    healing_steps: int = 50
    stuck_frac: float = 0.9

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield at most one finding, for the module at the input end of the line."""
        yield from findings_of(self, history, self._signs(history))

    def _signs(self, history: History) -> Iterator[Sign | None]:
        """Yield the observation of each mechanism, in a fixed order."""
        padding = list(
            find_fall_from_padding(
                history,
                at_once=self.critical_decades,
                soon=self.at_once,
                healing_steps=self.healing_steps,
                least=self.decades,
                learned=1 - self.stuck_frac,
            )
        )
        # the way from the padding to the tokens is a part of the sequence
        yield from padding or find_fall_over_time(history, decades=self.at_once)
        yield find_fall_over_depth(
            history,
            modules=self.modules,
            decades=self.decades,
            at_once=self.at_once,
            critical_decades=self.critical_decades,
            healing_steps=self.healing_steps,
            stuck_frac=self.stuck_frac,
        )

    def recovery(self, history: History, finding: Finding) -> Recovery | None:
        """Return the step from which the loss has been clearly lower, for (1) once the fall over depth is gone."""
        keys = {quantity.key for quantity in finding.evidence}
        end = fall_of_loss(history, fall=1 - self.stuck_frac)
        if PADDING in keys:
            return None if end is None else Recovery(end, "the loss fell: enough of the tokens is left")
        if PER_MODULE not in keys:
            return None
        fall = fall_over_depth(history, modules=self.modules)
        if end is None or fall is None or fall[0] >= self.decades:
            return None
        return Recovery(end, f"the loss fell, and gradients shrank only {format_fold(fall[0])}")

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, that stay quiet, and near misses."""
        faulty = Synthetic(steps=40).vanishing(decades=8)
        yield Example("gradients shrink 1e8-fold over twelve layers", faulty.history(), faulty.names(0))
        filters = make_gated()
        yield Example(
            "gradients shrink 1e5-fold over six gated layers, more in the gates", filters.history(), filters.names(0)
        )
        actor = make_gated().add_event(HEADS, values={"blocks.2.filter.weight": 4, "blocks.5.filter.weight": 10})
        yield Example("an actor next to its critics, whose gradients are larger", actor.history())
        apart = Synthetic(steps=40).vanishing(decades=8)
        towers = {layer.name: float(i > 3) + (i > 7) for i, layer in enumerate(apart.info.layers)}
        yield Example("three parts of four layers share no layer", apart.add_event(TOWERS, values=towers).history())
        critic = Synthetic(steps=40).vanishing(decades=8)
        parts = {layer.name: float(i > 9) for i, layer in enumerate(critic.info.layers)}
        yield Example("the larger of two parts", critic.add_event(TOWERS, values=parts).history(), critic.names(0))
        turned = Synthetic(steps=40).vanishing(decades=-8)
        depths = {layer.name: 1.0 + i for i, layer in enumerate(turned.info.layers)}
        yield Example(
            "layers that are registered from the output to the input",
            turned.add_event(DEPTHS, values=depths).history(),
            turned.names(len(depths) - 1),
        )
        yield Example("two models that are trained in turn", make_in_turn().history())
        late = Synthetic(steps=80).vanishing(decades=5, onset=40)
        yield Example("saturation sets in at step 40", late.history(), late.names(0))
        padded = Synthetic(steps=40).add_event(PADDING_READ, layer="layers.3", values={"padding": 0.7, "decades": 8.0})
        yield Example("the output of a recurrent layer is read at the padding", padded.history(), ("layers.3",))
        mild = Synthetic(steps=80).add_event(PADDING_READ, layer="layers.3", values={"padding": 0.3, "decades": 1.0})
        yield Example("padding is read, and the run learns", mild.history())
        yield Example("a recurrent cell forgets, which does no harm without a plateau", make_forgetful().history())
        yield Example("a healthy run", Synthetic(steps=40).history())
        yield Example("a fall by a factor of 30 is usual", Synthetic(steps=40).vanishing(decades=1.5).history())
        shrinking = Synthetic(steps=120)
        shrinking.grad_l2_TL *= 10 ** (-6 * shrinking.t_T / 120)[:, None]
        yield Example("a run converges: all layers shrink together", shrinking.history())
        yield Example(
            "one dead layer is a cliff, not a slope", Synthetic(steps=40).dead(0, onset=0, level=1e-12).history()
        )
