"""Find ReLUs with more and more units that fall silent: they fire for no sample of a batch.

With a penalty in the loss no gradient is exactly zero, and only the activations show silent units.
"""

# T = sampled steps, B = blocks of steps, A = activation modules

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gradwatch.detect.features.baseline import first_steps, is_learned
from gradwatch.detect.features.finding import Sign
from gradwatch.detect.features.silent_units import DEAD_SIDE_ACTIVATIONS, silent_units
from gradwatch.detect.gradients.rising_sparsity_rules.envelope import BLOCK_STEPS, CreepBounds
from gradwatch.history.store import History
from gradwatch.records import Quantity, Severity

WINDOW_SAMPLES = 64
"""Number of sampled steps to read: 640 steps, if every tenth is sampled."""


def find_silencing_units(history: History, bounds: CreepBounds, *, kind: str, blocks: int) -> Iterator[Sign]:
    """Yield a sign for each ReLU with units that fall silent, unless a gradient has shown it before."""
    if not history.info.activations or any(f.kind == kind for f in history.findings):
        return
    steps_T = history.act.steps(WINDOW_SAMPLES)
    if len(steps_T) < blocks or not np.fmax.reduce(history.act.newest("act.dead_frac")) >= bounds.level:
        return
    block_T = steps_T // BLOCK_STEPS
    ends_T = np.flatnonzero(block_T[1:] > block_T[:-1])  # the last sample of each block
    dead_TA = history.act.window("act.dead_frac", WINDOW_SAMPLES)
    low_BA = np.minimum.reduceat(dead_TA, np.concatenate([[0], ends_T + 1]), axis=0)[:-1]  # the newest is not whole
    if len(low_BA) < blocks:
        return
    first_A = first_steps(history, "act.dead_frac", 2).min(axis=0)
    if not bounds.is_high(low_BA[-1], first_A).any():
        return
    with np.errstate(invalid="ignore", divide="ignore"):
        affected_A = (
            bounds.is_high(low_BA[-1], first_A) & bounds.is_rising(low_BA) & bounds.is_creeping(low_BA, first_A)
        )
    for a in np.flatnonzero(affected_A).tolist():
        if history.info.activations[a].module_type in DEAD_SIDE_ACTIVATIONS:
            yield _sign(history, bounds, a, before=float(first_A[a]), now=float(low_BA[-1, a]))


def _sign(history: History, bounds: CreepBounds, activation: int, *, before: float, now: float) -> Sign:
    layer = history.info.activations[activation].name
    silent = silent_units(history, activation)
    dead = f"{100 * now:.0f} % are zero for every sample"
    at_once = _step_of_fall(history, activation, rise=now - before)
    message = f"more and more units of {layer} are dead: {dead}"
    if at_once is not None:
        message = f"most of the dead units of {layer} fell silent at once, at step {at_once}: {dead}"
    return Sign(
        message,
        (
            Quantity(key="act.dead_frac", value=now, unit="0..1"),
            Quantity(key="act.dead_frac.before", label="act.dead_frac of the first samples", value=before, unit="0..1"),
            *((silent.quantity(),) if silent else ()),
        ),
        since=at_once,
        layer=layer,
        severity=Severity.INFO if is_learned(history, left=bounds.left) else None,
    )


def _step_of_fall(history: History, activation: int, *, rise: float) -> int | None:
    """Return the sampled step that brought most of the rise of the dead fraction, or None if it was gradual."""
    dead_T = history.act.window("act.dead_frac", WINDOW_SAMPLES)[:, activation]
    rises_T = np.nan_to_num(np.diff(dead_T))
    largest = int(rises_T.argmax())
    return int(history.act.steps(WINDOW_SAMPLES)[largest + 1]) if rises_T[largest] > rise / 2 else None
