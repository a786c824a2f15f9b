"""GW202: sigmoid, tanh or softmax units that sit in their flat tails, where no gradient passes."""

# T = samples of the activations, A = activation modules

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, final

import numpy as np

from gradwatch.detect import Example
from gradwatch.detect.features.baseline import first_steps, is_learned
from gradwatch.detect.features.consequences import severity_after
from gradwatch.detect.features.finding import finding_of
from gradwatch.detect.features.robust_stats import median
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Finding, Quantity, Severity

FLAT_ON_BOTH_SIDES = ("Sigmoid", "Tanh", "Hardsigmoid", "Hardtanh", "Gate", "Clamp")
"""Activations whose tails are flat on both sides. ReLU6, ELU and their kin are meant to rest on one of theirs."""

USUAL = {"Hardtanh": 0.32, "Gate": 0.6, "Clamp": 0.6}
"""Share, 0..1, that may lie in the tails from the start. A hard tanh clips erfc(1 / sqrt 2) of standard normal inputs;
smooth ones 0.03. A gate (a sigmoid or tanh that multiplies) may be shut at first for most, and a clamp is there to cut
off: they count where nearly all is, as what becomes so later does."""

BEGINNING = 50
"""Steps that count as the beginning: what is saturated there is so by scale, not by what was learned."""

SUDDEN = 40
"""Steps within which outputs are driven into their tails from outside, by a temperature: learning multiplies the inputs
of a function by ten only where updates are large, which `learning-rate-too-high` tells."""

STAYS = 3
"""Samples for which they must have been there: two more than chance needs."""

MUCH = 0.2
"""Part of the first loss that is much: who is sure and right has less, as 0.99 has a cross entropy of 0.01."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SaturatedActivation:
    """Units that sit in the flat tails of their function.

    What it measures: per sigmoid, tanh and softmax, module or function, the fraction of outputs where the slope has
    fallen below 5 % of its maximum (for a softmax: rows where one entry has more than 0.99, though a mask left it more
    than one), as the smallest value over successive sampled batches. A third is reported where it was so from the first
    batch on, before anything was learned that could justify it. What gets there later is reported where nearly all is
    saturated, and not for a softmax, nor for the last module where the loss has fallen by a fifth or is that of several
    optimizers: they become sure by learning. These are reported where nearly all got there within 40 steps and stayed,
    while a fifth of the loss is left: faster than learning does it, as by a temperature that falls too fast.

    Why it matters: gradients through such a unit shrink twentyfold and more; what lies before it barely learns.

    When it is wrong: gates that are meant to be shut at first; hard attention; a pretrained network.

    What to do: bring the inputs to unit scale (raw pixels 0..255 are the usual reason); initialise with Xavier; divide
    attention scores by the root of their dimension; normalise before the function, or use another one.

    Source: Glorot & Bengio 2010, sec. 3, https://proceedings.mlr.press/v9/glorot10a.html; Vaswani et al. 2017, sec.
    3.2.1, https://arxiv.org/abs/1706.03762.

    Args:
        every: Steps between two looks. 10: activations are sampled that often.
        early: Saturated fraction, 0..1, above what is usual (0.32 for a hard tanh, 0.6 for gates and clamps, next to
            nothing for the others), to report if it was so from the start. 0.3: fresh networks that are fine begin
            below 0.15 (`scripts/studies/false_alarms.py`); a pretrained one had 0.43.
        late: The same for what became so. 0.9: healthy tanh layers of trained networks had up to 0.66.
        samples: Successive samples of which the smallest counts. 2: two batches that agree.
    """

    code: ClassVar[str] = "GW202"
    kind: ClassVar[str] = "saturated-activation"
    every: int = 10
    early: float = 0.3
    late: float = 0.9
    samples: int = 2

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding for each saturated module."""
        if not history.info.activations or len(history.act.steps(self.samples)) < self.samples:
            return
        is_early = history.step < BEGINNING
        bound = min(self.early, self.late) if is_early else self.late
        if not np.fmax.reduce(history.act.newest("act.saturated_frac")) >= bound:
            return
        saturated_A = history.act.window("act.saturated_frac", self.samples).min(axis=0)
        always_A = history.act.window("act.saturated_frac").min(axis=0)
        for a, activation in enumerate(history.info.activations):
            is_softmax = activation.module_type.startswith("Softmax")
            if not (is_softmax or activation.module_type in FLAT_ON_BOTH_SIDES):
                continue
            is_last = a == len(history.info.activations) - 1
            may_be_sure = is_softmax or (is_last and _has_learned(history))
            has_got_there = saturated_A[a] >= self.late and not may_be_sure
            early = self.early + USUAL.get(activation.module_type, 0.0)
            is_from_start = is_early and always_A[a] >= early
            if not (has_got_there or is_from_start or self._is_sudden(history, a)):
                continue
            yield finding_of(
                self,
                history,
                f"{100 * saturated_A[a]:.0f} % of the outputs of {activation.name} lie in its flat tails",
                Quantity(key="act.saturated_frac", value=float(saturated_A[a]), unit="0..1"),
                Quantity(key="act.mean", value=float(history.act.newest("act.mean")[a])),
                Quantity(key="act.std", value=float(history.act.newest("act.std")[a])),
                layer=activation.name,
                severity=Severity.WARNING if is_from_start else severity_after(history, self.kind),
            )

    def _is_sudden(self, history: History, activation: int) -> bool:
        """Say whether nearly all outputs went into the tails at once, and much of the loss is left."""
        if "+" in history.info.optimizer or is_learned(history, left=MUCH):
            return False
        saturated_T = history.act.window("act.saturated_frac")[:, activation]
        steps_T = history.act.steps()[~np.isnan(saturated_T)]
        saturated_T = saturated_T[~np.isnan(saturated_T)]
        free = np.flatnonzero(saturated_T < self.early)
        got_there = np.flatnonzero(saturated_T < self.late)
        if not len(free) or len(saturated_T) - 1 - got_there[-1] < STAYS:
            return False
        return bool(steps_T[got_there[-1] + 1] - steps_T[free[-1]] <= SUDDEN)

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, that stay quiet, and near misses."""
        yield Example("raw pixels go into a sigmoid", _with(1, "Sigmoid", fraction=0.95, onset=0), ("acts.1",))
        yield Example("attention is one-hot from the start", _with(2, "Softmax", fraction=0.5, onset=0), ("acts.2",))
        yield Example("a tanh is driven into its tails", _with(0, "Tanh", fraction=0.95, onset=60), ("acts.0",))
        yield Example("a healthy run", Synthetic(steps=100, activations=3).history())
        yield Example("a tanh layer uses its tails, once trained", _with(0, "Tanh", fraction=0.6, onset=60))
        yield Example("a hard tanh clips a third of normalised inputs", _with(1, "Hardtanh", fraction=0.34, onset=0))
        yield Example("gates are shut for good from the start", _with(1, "Gate", fraction=0.95, onset=0), ("acts.1",))
        yield Example("half of the gates are shut at first", _with(1, "Gate", fraction=0.5, onset=0))
        yield Example("a clamp cuts off a third", _with(1, "Clamp", fraction=0.35, onset=0))
        yield Example("a temperature falls too fast", _with(1, "Softmax", fraction=0.97, onset=60), ("acts.1",))
        sure = _made(2, "Sigmoid", fraction=0.97, onset=60)
        sure.loss_T[60:] *= 0.02
        yield Example("the output's sigmoid becomes sure", sure.history())
        slow = _made(1, "Softmax", fraction=0.97, onset=60)
        slow.saturated_frac_TA[:, 1] = np.minimum(0.012 * slow.t_T, 0.97)
        yield Example("attention sharpens step by step", slow.history())
        stuck = _made(2, "Tanh", fraction=1.0, onset=30)
        stuck.loss_T[:] = 2500
        yield Example("the output's tanh cannot reach its targets", stuck.history(), ("acts.2",))
        yield Example("half of the outputs of a ReLU6 are 0 or 6", _with(1, "ReLU6", fraction=0.5, onset=0))


def _has_learned(history: History) -> bool:
    """Say whether a fifth of the loss is gone, or whether the loss cannot tell."""
    first, newest = float(median(first_steps(history, "loss"))), float(median(history.scalar("loss", 16)))
    return "+" in history.info.optimizer or not newest > 0.8 * first


def _with(act: int, module_type: str, *, fraction: float, onset: int) -> History:
    return _made(act, module_type, fraction=fraction, onset=onset).history()


def _made(act: int, module_type: str, *, fraction: float, onset: int) -> Synthetic:
    """Return a run of three such modules, one of them saturated from onset on."""
    made = Synthetic(steps=100, activations=3)
    made.saturated_frac_TA[:] = 0.02
    made.saturated(act, fraction=fraction, onset=onset, module_type=module_type)
    made.info = replace(
        made.info, activations=tuple(replace(a, module_type=module_type) for a in made.info.activations)
    )
    return made
