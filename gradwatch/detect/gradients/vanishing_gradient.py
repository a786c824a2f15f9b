"""GW101: gradients shrink geometrically towards the input, so that early layers barely learn."""

# T = steps of a window, D = modules that have a weight matrix, input side first

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import ClassVar, final

import numpy as np
from numpy.typing import NDArray

from gradwatch.detect import Example
from gradwatch.detect.features.baseline import beginning
from gradwatch.detect.features.consequences import settled
from gradwatch.detect.features.events import noted
from gradwatch.detect.features.finding import finding_of
from gradwatch.detect.features.robust_stats import Floats, climb, median
from gradwatch.detect.features.scope import first_scope
from gradwatch.detect.features.structure import block_levels, depth, module_levels, spread, spreads
from gradwatch.events import HEADS, HIDDEN_SOFTMAX, RECURRENCE
from gradwatch.history.lookahead import Ahead
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Finding, Quantity, Severity

STEPS = 10
"""Steps of which the median is taken: more than the noise of single batches needs, few enough for an early word."""

HEALING = 50
"""Steps after which a mild fall that comes from the initialisation is gone, if it goes."""

PLATEAU = "loss-plateau"
"""Finding that nothing is learned: what lies far back in a sequence need not matter, where something is."""

NEGLIGIBLE = 6.0
"""Decades at which a common learning rate moves the first layers by less than float32 resolves (2^-24 = 6e-8)."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class VanishingGradient:
    """Gradients that shrink geometrically towards the input.

    What it measures: the size of a gradient element (root mean square) in each module with a weight matrix, as median
    over 10 steps, and how many decades a line through their logarithms falls towards the input. The output layer is
    left out: few units share all of the loss there, so that its elements are the largest by nature. The same over
    blocks, each by its largest: of what stands side by side in one, a gate may get far less; not where the model has
    several heads, whose blocks are no line. The line has to explain three quarters of the variance, and no single step
    between two modules may hold most of the fall: a cliff is a dead layer or a cut graph. Where the tape shows hidden
    layers whose activation is a softmax, two layers are enough, and the output counts: the slope p (1 - p) is about 1 /
    units, and each divides gradients by that number. Where a forward pass uses one parameter on its own result again
    and again, the fall from its last use to its first counts likewise, once a plateau of the loss was found: what lies
    far back in a sequence need not matter. And whether all weights have as much less gradient than the output's bias:
    where layers are too small the signal vanishes on its way forward as the gradient does on its way back, and their
    product has no slope.

    Why it matters: the first layers see what all others build on, and they hardly move. With SGD their updates are as
    small as their gradients; Adam rescales them, but below its eps (1e-8) it cannot, and what it rescales is noise.

    When it is wrong: networks of parallel towers have no single depth; the line follows the order in which the modules
    were made. A run that converges shrinks everywhere alike and keeps its profile.

    What to do: ReLU, GELU or SiLU instead of sigmoid and tanh; residual connections; batch or layer normalisation;
    an initialisation that keeps the variance (Xavier for tanh, He for ReLU).

    Source: Hochreiter 1991; Glorot & Bengio 2010, fig. 2 and 3, https://proceedings.mlr.press/v9/glorot10a.html.

    Args:
        every: Steps between two looks. 10: the profile of a network changes slowly.
        decades: Fall in powers of ten at which to report, where the loss has not fallen by a tenth after 50 steps. 2.5:
            four sigmoid layers in default initialisation lose 2.7; healthy runs stay within 2.2
            (`scripts/studies/false_alarms.py`).
        at_once: The same without waiting for the loss. 4: what SiLU or tanh lose over six layers of default
            initialisation (2.2) heals within 30 steps; seven sigmoid layers lose 5.2 and never learn.
        modules: Least number of modules with a weight matrix, with the output layer. 5: fewer make no line.
    """

    code: ClassVar[str] = "GW101"
    kind: ClassVar[str] = "vanishing-gradient"
    every: int = 10
    decades: float = 2.5
    at_once: float = 4.0
    modules: int = 5

    def rules_out(self, ahead: Ahead) -> NDArray[np.bool_]:
        """Say at which steps the ends of the profile over depth are alike."""
        l2_DL = ahead.newest("grad.l2")
        is_flat_D = ~self._is_faint(ahead.history, l2_DL, self.decades)
        is_noted = any(event.kind in (HIDDEN_SOFTMAX.name, RECURRENCE.name) for event in ahead.history.events)
        if is_noted or len(depth(ahead.history).starts_D) < self.modules:
            return is_flat_D & (not is_noted)
        return is_flat_D & (spreads(ahead.history, l2_DL) < 10 ** (min(self.decades, self.at_once) / 2))

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield one finding, for the module at the input end of the line."""
        yield from self._through_softmax(history)
        yield from self._over_time(history)
        yield from self._all_faint(history)
        shape = depth(history)
        if len(shape.starts_D) < self.modules or spread(history) < 10 ** (min(self.decades, self.at_once) / 2):
            return
        l2_TL = history.param.window("grad.l2", STEPS)
        if len(l2_TL) < STEPS:
            return
        level_D = module_levels(history, median(l2_TL))
        levels = [level_D] if any(noted(history, HEADS)) else [level_D, block_levels(history, level_D)]
        lines = [line[~np.isnan(line)] for line in (level[:-1] for level in levels)]
        long = [line for line in lines if len(line) >= self.modules - 1]
        if not long:
            return
        fall, line = max(((climb(line), line) for line in long), key=itemgetter(0))
        if fall < self.decades or (fall < self.at_once and not self._is_stuck(history)):
            return
        layer = first_scope(history, int(shape.chain_K[shape.starts_D[np.flatnonzero(~np.isnan(level_D))[0]]]))
        yield finding_of(
            self,
            history,
            f"gradients shrink by {fall:.1f} decades towards {layer}",
            Quantity(key="depth.fall_decades", label="fall over depth", value=fall, unit="decades"),
            Quantity(
                key="depth.fall_per_module_decades",
                label="fall per module",
                value=fall / (len(line) - 1),
                unit="decades",
            ),
            Quantity(key="modules", value=float(len(line))),
            Quantity(key="grad.element.first", label="gradient element at the input", value=float(10 ** line[0])),
            Quantity(key="grad.element.last", label="gradient element before the output", value=float(10 ** line[-1])),
            layer=layer,
            severity=Severity.CRITICAL if fall >= NEGLIGIBLE else Severity.WARNING,
        )

    def _is_faint(self, history: History, l2_TL: Floats, decades: float) -> NDArray[np.bool_]:
        """Say at which steps the gradient of each weight matrix is that far below that of the output's bias."""
        shape = depth(history)
        if shape.output_bias is None or len(shape.matrices_M) < 3:
            return np.zeros(len(l2_TL), np.bool_)
        most_T = l2_TL[:, shape.matrices_M].max(axis=1)
        return np.asarray((most_T > 0) & (most_T < 10**-decades * l2_TL[:, shape.output_bias]))

    def _all_faint(self, history: History) -> Iterator[Finding]:
        """Yield a finding where the loss reaches the output's bias and, next to that, no weight."""
        l2_TL = history.param.window("grad.l2", STEPS)
        if len(l2_TL) < STEPS or not self._is_faint(history, l2_TL, min(self.decades, self.at_once)).all():
            return
        decades = self.decades if self._is_stuck(history) else self.at_once
        if not self._is_faint(history, l2_TL, decades).all():
            return
        shape = depth(history)
        size = median(l2_TL)
        fall = float(np.log10(size[shape.output_bias] / size[shape.matrices_M].max()))
        layer = first_scope(history, int(shape.matrices_M[0]))
        yield finding_of(
            self,
            history,
            f"no weight gets more than 1e-{fall:.1f} of what the output's bias gets: signals vanish on their way",
            Quantity(
                key="output_bias.fall_decades",
                label="largest gradient of a weight below that of the output's bias",
                value=fall,
                unit="decades",
            ),
            Quantity(
                key="grad.l2.output_bias", label="grad.l2 of the output's bias", value=float(size[shape.output_bias])
            ),
            layer=layer,
            severity=settled(history, self.kind),
        )

    def _over_time(self, history: History) -> Iterator[Finding]:
        """Yield a finding for the parameter through whose uses the gradient vanishes, where nothing is learned."""
        is_plateau = any(f.kind == PLATEAU and f.severity >= Severity.WARNING for f in history.findings)
        for event in noted(history, RECURRENCE) if is_plateau else ():
            fall, uses = -event.values["growth"], event.values["uses"]
            if fall < self.at_once:
                continue
            yield finding_of(
                self,
                history,
                f"nothing is learned, and gradients shrink by {fall:.1f} decades on their way back through "
                f"{uses:.0f} uses of {event.layer}",
                Quantity(
                    key="recurrence.fall_decades",
                    label="fall from the last use to the first",
                    value=fall,
                    unit="decades",
                ),
                Quantity(
                    key="recurrence.factor_per_use",
                    label="factor of each use",
                    value=10 ** (-fall / uses),
                    unit="times",
                ),
                layer=event.layer,
            )

    def _through_softmax(self, history: History) -> Iterator[Finding]:
        """Yield a finding for the first layer whose activation is a softmax, where that makes gradients vanish."""
        softmax = list(noted(history, HIDDEN_SOFTMAX))
        l2_TL = history.param.window("grad.l2", STEPS)
        if not softmax or len(l2_TL) < STEPS or any(f.kind == self.kind for f in history.findings):
            return
        first = min(int(event.values["before"]) for event in softmax)
        last = max(int(event.values["behind"]) for event in softmax)
        size = median(l2_TL)[[first, last]] / depth(history).root_numel_L[[first, last]]
        if not 0 < size[0] < size[1] < np.inf:
            return
        fall = float(np.log10(size[1] / size[0]))
        if fall < self.decades or (fall < self.at_once and not self._is_stuck(history)):
            return
        layer = first_scope(history, first)
        yield finding_of(
            self,
            history,
            f"gradients shrink by {fall:.1f} decades towards {layer}, through a softmax as hidden activation",
            Quantity(key="depth.fall_decades", label="fall over depth", value=fall, unit="decades"),
            Quantity(key="softmax.hidden_layers", label="hidden layers with a softmax", value=float(len(softmax))),
            Quantity(key="grad.element.first", label="gradient element at the first", value=float(size[0])),
            Quantity(key="grad.element.last", label="gradient element behind the last", value=float(size[1])),
            layer=layer,
            severity=Severity.CRITICAL if fall >= NEGLIGIBLE else Severity.WARNING,
        )

    def _is_stuck(self, history: History) -> bool:
        """Say whether the loss is still where it began, after the steps in which a mild fall heals by itself."""
        if history.step < HEALING:
            return False
        first = float(median(beginning(history, "loss")))
        return float(median(history.scalar("loss", STEPS))) > 0.9 * first

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, that stay quiet, and near misses."""
        sick = Synthetic(steps=40).vanishing(decades=8)
        yield Example("twelve layers lose eight decades", sick.history(), sick.names(0))
        gated = _gated()
        yield Example(
            "six gated layers lose five decades, and their gates have far less", gated.history(), gated.names(0)
        )
        actor = _gated().note(HEADS, values={"blocks.2.filter.weight": 4, "blocks.5.filter.weight": 10})
        yield Example("an actor beside its critics, whose gradients are larger", actor.history())
        late = Synthetic(steps=80).vanishing(decades=5, onset=40)
        yield Example("saturation sets in at step 40", late.history(), late.names(0))
        flat = Synthetic(steps=80).note(HIDDEN_SOFTMAX, layer="layers.9.weight", values={"before": 9, "behind": 11})
        flat.grad_l2_TL[:, 9] *= 1e-5
        yield Example("a softmax in a hidden layer divides gradients by its units", flat.history(), flat.names(9))
        yield Example("a cell forgets, and what is to be learned lies in what it remembers", _forgetful().history())
        small = Synthetic(steps=40)
        small.grad_l2_TL[:, -1] *= 1e5
        bias = replace(small.info.layers[-1], name="layers.11.bias", module="layers.10", shape=(64,))
        small.info = replace(small.info, layers=(*small.info.layers[:-1], bias))
        yield Example("signal and gradient vanish, and only the output's bias learns", small.history(), small.names(0))
        learns = Synthetic(steps=80).note(HIDDEN_SOFTMAX, layer="layers.9.weight", values={"before": 9, "behind": 11})
        yield Example("a softmax over a few prototypes is no obstacle", learns.history())
        yield Example("a healthy run", Synthetic(steps=40).history())
        yield Example("a fall of 1.5 decades is usual", Synthetic(steps=40).vanishing(decades=1.5).history())
        shrinking = Synthetic(steps=120)
        shrinking.grad_l2_TL *= 10 ** (-6 * shrinking.t_T / 120)[:, None]
        yield Example("a run converges: all layers shrink together", shrinking.history())
        yield Example(
            "one dead layer is a cliff, not a slope", Synthetic(steps=40).dead(0, onset=0, level=1e-12).history()
        )


def _gated() -> Synthetic:
    """Return a run of layers of a filter and a gate each, in which gradients vanish, and gates get a hundredth."""
    made = Synthetic(steps=40).vanishing(decades=5)
    made.grad_l2_TL[:, 1:-1:2] *= 0.01
    names = [f"blocks.{i // 2}.{('filter', 'gate')[i % 2]}" for i in range(11)]
    layers = (replace(la, name=f"{n}.weight", module=n) for la, n in zip(made.info.layers, names, strict=False))
    made.info = replace(made.info, layers=(*layers, made.info.layers[-1]))
    return made


def _forgetful() -> Synthetic:
    """Return a run of a recurrence whose gradients vanish on their way back."""
    values = {"uses": 80.0, "growth": -20.0}
    return Synthetic(steps=80).note(RECURRENCE, layer="layers.3.weight", values=values)
