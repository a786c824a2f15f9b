"""Find parameters that get gradients and that no optimizer holds."""

# L = parameter tensors

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from gradwatch.detect.features.events import events_of
from gradwatch.detect.features.finding import HasCode, finding_of
from gradwatch.detect.features.structure import structure_of
from gradwatch.detect.updates.not_optimized_rules.measurements import findings_of, has_gradient
from gradwatch.events import (
    EMPTY_GROUP,
    NOTHING_TRAINABLE,
    PARAMETERS_NEW,
    UNHELD,
    UNHELD_KEPT,
    UNREGISTERED,
    WEIGHTS_MOVED,
)
from gradwatch.history.store import Floats, History
from gradwatch.records import Finding, Quantity, Severity


def find_unregistered_tensors(detector: HasCode, history: History) -> Iterator[Finding]:
    """Yield the tensors that the model computes with but does not register as parameters."""
    for event in events_of(history, UNREGISTERED):
        tensors = Quantity(key="tensors", value=event.values["tensors"])
        yield finding_of(detector, history, f"{event.text}: nothing updates them", tensors, layer=event.layer)
    for event in events_of(history, UNHELD):
        tensors = Quantity(key="tensors", value=event.values["tensors"])
        yield finding_of(detector, history, event.text, tensors, severity=Severity.INFO)
    for event in events_of(history, PARAMETERS_NEW):
        tensors = Quantity(key="tensors", value=event.values["tensors"])
        yield finding_of(detector, history, event.text, tensors, layer=event.layer)


def find_nothing_to_train(detector: HasCode, history: History) -> Iterator[Finding]:
    """Yield the run if no parameter can be updated, from the first step on."""
    held = any(layer.group is not None and layer.trainable for layer in history.info.layers)
    for event in events_of(history, NOTHING_TRAINABLE):
        tensors = Quantity(key="tensors", value=float(len(history.info.layers)))
        severity = Severity.WARNING if held else Severity.CRITICAL
        yield finding_of(detector, history, event.text, tensors, severity=severity)


def find_unowned_parameters(detector: HasCode, history: History, ratio_L: Floats) -> Iterator[Finding]:
    """Yield the trainable tensors with a gradient that no optimizer held when the monitor attached."""
    moved_L = _is_moved_by_others(history)
    left = [i for i in structure_of(history).unowned if not moved_L[i]]
    if not left:
        return
    left_L = np.zeros(len(ratio_L), np.bool_)
    left_L[left] = True
    # what overflowed while a gradient scaler was too high stays, where nothing clears it
    has_gradient_L = (history.param.newest("grad.l2") > 0) | (history.param.newest("grad.nonfinite") > 0)
    # `~` of `> 0` is True for nan: an update that was not measured
    left_L &= has_gradient_L & ~(ratio_L > 0)  # a measured update: other code moves the tensor
    held = [i for i, layer in enumerate(history.info.layers) if layer.group is not None or moved_L[i]]
    if not held:
        severity, why = Severity.CRITICAL, "no optimizer holds any parameter of the model"
    # an empty group, as from a used-up generator, explains the omission
    elif empty := [event.text for event in history.events if event.kind == EMPTY_GROUP.name]:
        severity, why = Severity.WARNING, empty[0]
    elif kept := [*events_of(history, UNHELD_KEPT)]:
        severity, why = Severity.WARNING, f"no optimizer holds it, and the gradient of {kept[0].layer} adds up"
    elif _is_probe(history, left, held):
        severity, why = Severity.INFO, "all later layers are: freeze it if this is intended"
    else:
        severity, why = Severity.WARNING, "no optimizer holds it"
    what = f"gets gradients but is not optimized: {why}"
    yield from findings_of(detector, history, left_L, severity=severity, what=what)


def find_unfrozen_parameters(
    detector: HasCode, history: History, ratio_L: Floats, *, stale: int, gradient: float
) -> Iterator[Finding]:
    """Yield tensors that were frozen when the monitor attached and now get gradients outside any optimizer.

    Args:
        detector: Detector of the findings.
        history: History of the run.
        ratio_L: Newest `update.ratio` of each tensor.
        stale: Steps without a rise of the gradient norm that show a gradient from before the tensor was frozen.
        gradient: Size of a gradient element, in units of the largest tensor's, up to which a tensor need not move.
    """
    frozen = list(structure_of(history).frozen)
    if not frozen:
        return
    thawed_L = np.zeros(len(ratio_L), np.bool_)
    # a gradient from before the tensor was frozen stays, or shrinks if the loop clips it with the others
    l2_TL = history.param.window("grad.l2", stale)[:, frozen]
    is_stale_L = (np.diff(l2_TL, axis=0) <= 0).all(axis=0)
    thawed_L[frozen] = (l2_TL[-1] > 0) & ~is_stale_L & (ratio_L[frozen] == 0)
    thawed_L &= has_gradient(history, least=gradient) & ~_is_moved_by_others(history)
    why = "it was frozen when the optimizer was built and was not added after unfreezing"
    what = f"gets gradients but is not optimized: {why}"
    yield from findings_of(detector, history, thawed_L, severity=Severity.WARNING, what=what, thawed=True)


def _is_moved_by_others(history: History) -> NDArray[np.bool_]:
    """Return which tensors moved although no watched optimizer holds them, of shape (L,)."""
    moved_L = np.zeros(len(history.info.layers), np.bool_)
    for event in history.events:
        if event.kind == WEIGHTS_MOVED.name:
            moved_L[int(event.values["first"]) : int(event.values["last"]) + 1] = True
    return moved_L


def _is_probe(history: History, left: list[int], held: list[int]) -> bool:
    """Return whether the tensors may be left out on purpose, as when a head is fine-tuned.

    They come first in the model, and no larger part of the model is frozen: a user who freezes layers would have frozen
    these too.
    """
    infos = history.info.layers
    num_frozen = sum(math.prod(info.shape) for info in infos if not info.trainable)
    is_frozen_otherwise = num_frozen > sum(math.prod(infos[i].shape) for i in left)
    return max(left) < min(held) and not is_frozen_otherwise and not all(_is_own(history, i, held) for i in left)


def _is_own(history: History, tensor: int, held: list[int]) -> bool:
    """Return whether a tensor comes first only because it belongs to the module that contains all held layers."""
    module = history.info.layers[tensor].module
    return all(history.info.layers[i].module.startswith(f"{module}." if module else "") for i in held)
