"""Recognize experts: identical parallel modules that a router may simply not choose."""

# T = steps of a window, L = parameter tensors

from __future__ import annotations

import math
import re

import numpy as np
from numpy.typing import NDArray

from gradwatch.detect.features.events import events_of
from gradwatch.detect.features.robust_stats import Floats
from gradwatch.detect.features.routing import routings
from gradwatch.detect.features.sequential_test import SequentialTest, allowed_error, looks_in_window, window_number
from gradwatch.detect.features.structure import structure_of
from gradwatch.detect.gradients.dead_layer_rules.cliff import runs_of
from gradwatch.events import SIDE_BY_SIDE
from gradwatch.history.store import History


def is_side_by_side(history: History) -> NDArray[np.bool_]:
    """Return which tensors lie in one of several parallel modules, of shape (L,)."""
    parents = tuple(f"{event.layer}." for event in events_of(history, SIDE_BY_SIDE))
    return np.array([layer.name.startswith(parents) for layer in history.info.layers])


def router_of(history: History, name: str) -> int | None:
    """Return the index of the choice of the router that a module or tensor is an expert of, if it is watched."""
    return next(
        (
            activation
            for activation in routings(history)
            if any(f"{name}.".startswith(f"{expert}.") for expert in experts_of(history, activation))
        ),
        None,
    )


def experts_of(history: History, activation: int) -> dict[str, list[int]]:
    """Return the tensors of each expert of a router by the name of the expert; empty if the experts are not modules.

    Experts are numbered modules next to the router, or next to its parent, as many as its outputs: `moe.experts.0` for
    `moe.gate` and for `moe.gate.linear`.

    Args:
        history: History of the run.
        activation: Index of the choice of the router among the activations.
    """
    router, number = routings(history)[activation], history.act.newest("act.units")[activation]
    groups: dict[str, dict[str, list[int]]] = {}
    for i, layer in enumerate(history.info.layers):
        for match in re.finditer(r"\.\d+(?=\.)", layer.name):
            parent = layer.name[: match.start()]
            if _is_next_to(router, parent):
                groups.setdefault(parent, {}).setdefault(layer.name[: match.end()], []).append(i)
    return next((experts for experts in groups.values() if len(experts) == number), {})


def _is_next_to(router: str, parent: str) -> bool:
    *holder, _ = parent.split(".")
    own = router.split(".")
    is_inside = own[: len(holder) + 1] == parent.split(".")  # as a router in one of several blocks
    return own[: len(holder)] == holder and len(own) - len(holder) <= 2 and not is_inside


def live_frac_of_siblings(history: History, name: str, newest_L: Floats) -> float | None:
    """Return the fraction of a module and its siblings with a gradient, 0..1; None without siblings."""
    router = router_of(history, name)
    if router is not None:
        experts = experts_of(history, router).values()
        return sum(bool((newest_L[group] > 0).any()) for group in experts) / len(experts)
    for event in events_of(history, SIDE_BY_SIDE):
        if event.layer is None or not name.startswith(f"{event.layer}."):
            continue
        place = event.layer.count(".") + 1  # position of the sibling's name in the parts of a tensor name
        inside = [i for i, la in enumerate(history.info.layers) if la.name.startswith(f"{event.layer}.")]
        alive = {history.info.layers[i].name.split(".")[place] for i in inside if newest_L[i] > 0}
        return len(alive) / event.values["modules"]
    return None


def comes_and_goes(history: History, group: list[int], *, every: int) -> bool:
    """Return whether the gradient of a group comes and goes, so that its newest absence may be chance.

    Args:
        history: History of the run.
        group: Indices of the tensors, which have no gradient now.
        every: Steps between two calls.
    """
    is_away_T = ~np.any(history.param.window("grad.l2")[:, group] > 0, axis=1)
    among = structure_of(history).num_trainable * looks_in_window(every)
    error = allowed_error(SequentialTest.LONG_ABSENCE, window_number(history), among=among)
    return chance_of_absence(is_away_T) > error


def chance_of_absence(is_away_T: NDArray[np.bool_]) -> float:
    """Return the probability of an absence as long as the one that lasts until the newest step, 0 if it is the first.

    The steps are split into blocks that are longer than the longest absence before, so each earlier block was in use.
    If the newest absence is chance, all orders of the blocks are equally likely, and those without use come last in one
    of them. Blocks that long make up for choices that last for some steps, whose successive steps are not independent.
    """
    *before, newest = (end - start for start, end in runs_of(is_away_T))
    if not before:
        return 0.0
    size = max(before) + 1
    used, unused = (len(is_away_T) - newest) // size, newest // size
    return 1 / math.comb(used + unused, unused)
