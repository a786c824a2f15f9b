"""Find ReLU units that fire for no sample, batch after batch (GW201)."""

# A = activation modules, T = sampled steps

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
from numpy.typing import NDArray

from gradwatch.detect import Example, Recovery
from gradwatch.detect.features.finding import Sign, findings_of
from gradwatch.detect.features.lasting_frac import lasting_frac
from gradwatch.detect.features.recovery import start_of_state
from gradwatch.detect.features.robust_stats import Floats
from gradwatch.detect.features.silent_units import DEAD_SIDE_ACTIVATIONS, silent_units
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Finding, Quantity, Severity

JUMP_SAMPLES = 5
"""Sampled batches before the counted ones, within which many of the dead units must have died for a jump."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DeadRelu:
    """ReLU units that are zero for every sample.

    What it measures: the fraction of dead units of each ReLU, as a module or as a function (`fc1.relu` is the
    `torch.relu` after `fc1`).

    Why it matters: a dead unit gets no gradient and cannot recover. If all units of a layer are dead, no earlier layer
    learns.

    Example: `nn.init.constant_(fc1.bias, -10)`, or one update at a learning rate 100 times too high.

    What to do: find out why the inputs became negative: the bias initialization, the learning rate, inputs that are not
    normalized. LeakyReLU and GELU keep a gradient. Kaiming initialization and normalization keep half of the inputs
    positive.

    When it is wrong: tiny batches; wide sparse layers (mixtures, dictionaries), which are mostly zero on purpose.
    Functional calls in compiled or checkpointed regions are not seen.

    When it is withdrawn: fewer than `jump` of the units were dead in each of `recovered` samples in a row.

    How it is detected: units are channels in a convolution, features elsewhere. The fraction is the smallest of
    successive sampled batches, because a unit that is silent in one batch only is selective, not dead. Dead units do
    not wake, so a finding waits while the fraction falls: if it would leave its threshold within `recovered` samples at
    the pace of the newest two, as behind spiking neurons, few of which fire at first. The evidence also counts the
    units that have not fired at any sampled step since a given step. The finding is critical if all units are dead, and
    info if the fraction only jumped.

    Source: Lu et al. 2020, "Dying ReLU and initialization", https://arxiv.org/abs/1903.06733; Maas et al. 2013
    (LeakyReLU), sec. 2.

    Args:
        every: Steps between two calls. 10: activations are sampled that often.
        fraction: Dead fraction, 0..1, at which to report. 0.85: such a layer has the capacity of one a seventh as wide.
            Healthy layers stay below 0.6 (`scripts/studies/false_alarms.py`), with two samples per batch below 0.8.
        jump: Dead fraction to report as info if `fresh` of it came within the newest 5 samples. 0.6: that many units
            die at once only after a push. Some healthy narrow layers lose as many and still learn.
        samples: Successive samples over which the smallest counts. 2: two batches that agree.
        fresh: Part of the dead fraction, 0..1, that must have come within the newest 5 samples for a jump. 0.5: most
            of them died at once.
        recovered: Samples in a row with fewer dead units that withdraw a finding, and samples within which a falling
            fraction would leave its threshold. 5: a few may lack them by chance.
    """

    code: ClassVar[str] = "GW201"
    kind: ClassVar[str] = "dead-relu"
    every: int = 10
    fraction: float = 0.85
    jump: float = 0.6
    samples: int = 2
    fresh: float = 0.5
    recovered: int = 5

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding for each ReLU with dead units."""
        yield from findings_of(self, history, self._signs(history))

    def _signs(self, history: History) -> Iterator[Sign]:
        # the lower bound of both rules: one cheap check serves both
        bound = min(self.jump, self.fraction)
        dead_A = lasting_frac(history, "act.dead_frac", samples=self.samples, at_least=bound)
        if dead_A is None:
            return
        # a shorter run has fewer rows: its first sample counts as before
        before_A = history.act.window("act.dead_frac", JUMP_SAMPLES + self.samples)[0]
        is_waking_A = self._is_waking(history, dead_A)
        for a, activation in enumerate(history.info.activations):
            if is_waking_A[a]:
                continue
            has_jumped = dead_A[a] >= self.jump and before_A[a] <= (1 - self.fresh) * dead_A[a]
            if activation.module_type in DEAD_SIDE_ACTIVATIONS and (dead_A[a] >= self.fraction or has_jumped):
                yield self._sign(history, a, dead=float(dead_A[a]), before=float(before_A[a]))

    def _is_waking(self, history: History, dead_A: Floats) -> NDArray[np.bool_]:
        """Return for each activation whether its dead fraction falls below its threshold within `recovered` samples."""
        newest_TA = history.act.window("act.dead_frac", 2)  # one row after the first sample
        newest_A, fall_A = newest_TA[-1], newest_TA[0] - newest_TA[-1]
        bound_A = np.where(dead_A >= self.fraction, self.fraction, self.jump)
        return np.asarray((fall_A > 0) & (newest_A - self.recovered * fall_A < bound_A))

    def _sign(self, history: History, activation: int, *, dead: float, before: float) -> Sign:
        layer, silent = history.info.activations[activation].name, silent_units(history, activation)
        share = "all" if dead == 1 else f"{100 * dead:.0f} %"
        message = f"{share} of the units of {layer} are dead (zero for every sample)"
        # the step holds for the silent units: name it for all units only if all of them are silent
        is_all_silent = silent is not None and dead == 1 and silent.num_silent == silent.num_units
        if silent and is_all_silent:
            since = f"zero for every sample since step {silent.since}"
            message = f"all {silent.num_units} units of {layer} are dead ({since})"
        elif silent:
            message += f"; {silent.num_silent} of {silent.num_units} units since step {silent.since}"
        # all units: the step at which the last one died; otherwise the samples that had as many dead units
        is_high_T = history.act.window("act.dead_frac")[:, activation] >= min(self.jump, self.fraction)
        onset = silent.since if silent and is_all_silent else start_of_state(is_high_T, history.act.steps())
        label = f"act.dead_frac {JUMP_SAMPLES + self.samples - 1} samples before"
        is_jump = dead < self.fraction
        return Sign(
            message,
            (
                Quantity(key="act.dead_frac", value=dead, unit="0..1"),
                Quantity(key="act.dead_frac.before", label=label, value=before, unit="0..1"),
                *((silent.quantity(),) if silent else ()),
            ),
            since=onset,
            layer=layer,
            severity=Severity.CRITICAL if dead == 1 else Severity.INFO if is_jump else None,  # a jump may recover
        )

    def recovery(self, history: History, finding: Finding) -> Recovery | None:
        """Return the first of `recovered` samples in a row in which most units fired."""
        if finding.layer not in history.act.layers:
            return None
        dead_T = history.act.window("act.dead_frac")[:, history.act.layers.index(finding.layer)]
        is_low_T = dead_T < min(self.jump, self.fraction)
        end = start_of_state(is_low_T, history.act.steps(), least=self.recovered)
        return None if end is None else Recovery(end, f"{100 * (1 - dead_T[-1]):.0f} % of its units fired again")

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, that stay quiet, and near misses."""
        yield Example("all units die at step 60", _with_dead(1, fraction=1), ("acts.1",))
        yield Example("nine of ten units never fired", _with_dead(2, fraction=0.9, onset=0), ("acts.2",))
        yield Example("two thirds of the units die after a large step", _with_dead(0, fraction=0.66), ("acts.0",))
        yield Example("a healthy run", Synthetic(steps=100, activations=3).history())
        yield Example("half of the units of a wide layer are silent", _with_dead(1, fraction=0.5))
        batch = Synthetic(steps=100, activations=3)
        batch.dead_frac_TA[50:51] = 1
        yield Example("one batch is blank", batch.history())
        gelu = Synthetic(steps=100, activations=3).dead_relu(1, fraction=0.95, onset=0).saturated(1, module_type="GELU")
        yield Example("a GELU has no dead side", gelu.history())
        yield Example("the units wake one by one", _with_falling(0.97, to=0.6))
        yield Example("a few of the dead units wake", _with_falling(0.98, to=0.95), ("acts.1",))


def _with_dead(act: int, *, fraction: float, onset: int = 60) -> History:
    return Synthetic(steps=100, activations=3).dead_relu(act, fraction=fraction, onset=onset).history()


def _with_falling(first: float, *, to: float) -> History:
    run = Synthetic(steps=100, activations=3)
    run.dead_frac_TA[:, 1] = np.linspace(first, to, 100)
    return run.history()
