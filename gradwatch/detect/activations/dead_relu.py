"""GW201: units whose ReLU fires for no sample of a batch, batch after batch."""

# T = samples of the activations, A = activation modules

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from gradwatch.detect import Example
from gradwatch.detect.features.consequences import severity_after
from gradwatch.detect.features.finding import finding_of
from gradwatch.detect.features.silent_units import DEAD_SIDE_ACTIVATIONS, SilentModule, silent_units
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Finding, Quantity, Severity


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DeadRelu:
    """Units whose ReLU never fires.

    What it measures: per ReLU, module or function (`fc1.relu` is the `torch.relu` behind `fc1`), the fraction of units
    (channels of a convolution, features elsewhere) that are zero for every sample of the batch, as the smallest value
    over successive sampled batches: a unit that is silent in one batch and not in the next is selective, not dead. The
    evidence says how many units have fired at no sampled step since which step, which the probe remembers at a few bits
    per unit.

    Why it matters: a unit that never fires gets no gradient and can never come back. Where all units of a module are
    dead the signal ends there: everything before it stops learning.

    When it is wrong: tiny batches silence selective units by chance; wide, sparse layers (mixtures, dictionaries) are
    meant to be silent mostly. Of functional calls, those in a compiled or a checkpointed region are not seen.

    What to do: find what pushed the inputs below zero: a bias initialised far below zero, a large step (learning rate
    too high or without warm-up), inputs that were not normalised. LeakyReLU or GELU let a gradient through; He
    initialisation and normalisation keep half of the inputs positive.

    Source: Lu et al. 2020, "Dying ReLU and initialization", https://arxiv.org/abs/1903.06733; Maas et al. 2013
    (LeakyReLU), sec. 2.

    Args:
        every: Steps between two looks. 10: activations are sampled that often.
        fraction: Dead fraction, 0..1, at which to report. 0.85: a layer with that many dead units has the capacity of
            one a seventh as wide; healthy ones stay below 0.6 (`scripts/studies/false_alarms.py`), with two samples
            per batch below 0.8.
        jump: Dead fraction at which to say so (info) where half of it came within the newest 5 samples. 0.6: that many
            die at once only after a push; some healthy narrow layers lose as many and still learn.
        samples: Successive samples of which the smallest counts. 2: two batches that agree.
    """

    code: ClassVar[str] = "GW201"
    kind: ClassVar[str] = "dead-relu"
    every: int = 10
    fraction: float = 0.85
    jump: float = 0.6
    samples: int = 2

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding for each ReLU module with dead units."""
        if not history.info.activations or len(history.act.steps(self.samples)) < self.samples:
            return
        if not np.fmax.reduce(history.act.newest("act.dead_frac")) >= min(self.jump, self.fraction):
            return
        dead_TA = history.act.window("act.dead_frac", 5 + self.samples)
        now_A = dead_TA[-self.samples :].min(axis=0)  # nan where it was not measured
        for a, activation in enumerate(history.info.activations):
            has_jumped = now_A[a] >= self.jump and dead_TA[0, a] <= now_A[a] / 2
            if activation.module_type in DEAD_SIDE_ACTIVATIONS and (now_A[a] >= self.fraction or has_jumped):
                silent = silent_units(history, a)
                dead, before = float(now_A[a]), float(dead_TA[0, a])
                yield self._finding(history, activation.name, dead=dead, before=before, silent=silent)

    def _finding(
        self, history: History, layer: str, *, dead: float, before: float, silent: SilentModule | None
    ) -> Finding:
        since = f"; {silent.count} of {silent.units} units since step {silent.since}" if silent else ""
        share = "all" if dead == 1 else f"{100 * dead:.0f} %"
        severity = severity_after(history, self.kind) if dead >= self.fraction else Severity.INFO
        severity = Severity.CRITICAL if dead == 1 else severity  # nothing passes any more
        return finding_of(
            self,
            history,
            f"{share} of the units of {layer} fire for no sample{since}",
            Quantity(key="act.dead_frac", value=dead, unit="0..1"),
            Quantity(
                key="act.dead_frac.before",
                label=f"act.dead_frac {4 + self.samples} samples before",
                value=before,
                unit="0..1",
            ),
            *((silent.quantity(),) if silent else ()),
            layer=layer,
            severity=severity,
        )

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, that stay quiet, and near misses."""
        yield Example(
            "all units die at step 60",
            Synthetic(steps=100, activations=3).dead_relu(1, fraction=1, onset=60).history(),
            ("acts.1",),
        )
        yield Example(
            "nine of ten never fired",
            Synthetic(steps=40, activations=3).dead_relu(2, fraction=0.9, onset=0).history(),
            ("acts.2",),
        )
        yield Example(
            "two thirds die after a large step",
            Synthetic(steps=100, activations=3).dead_relu(0, fraction=0.66, onset=60).history(),
            ("acts.0",),
        )
        yield Example("a healthy run", Synthetic(steps=100, activations=3).history())
        yield Example(
            "half of the units of a wide layer are silent",
            Synthetic(steps=100, activations=3).dead_relu(1, fraction=0.5, onset=60).history(),
        )
        batch = Synthetic(steps=100, activations=3)
        batch.dead_frac_TA[50:51] = 1
        yield Example("one batch is blank", batch.history())
        gelu = Synthetic(steps=100, activations=3).dead_relu(1, fraction=0.95, onset=0).saturated(1, module_type="GELU")
        yield Example("a GELU has no dead side", gelu.history())
