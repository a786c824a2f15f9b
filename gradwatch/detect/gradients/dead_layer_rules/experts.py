"""Recognize experts: identical parallel modules that a router may simply not choose."""

# T = steps of a window, L = parameter tensors

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gradwatch.detect.features.events import events_of
from gradwatch.detect.features.robust_stats import Floats
from gradwatch.detect.gradients.dead_layer_rules.cliff import runs_of
from gradwatch.events import SIDE_BY_SIDE
from gradwatch.history.store import History

MIN_TURNS = 3
"""Times that a gradient disappeared or returned: a layer dies once, an expert comes and goes."""

MIN_GONE_STEPS = 60
"""Steps after which a layer that came and went may be gone for good."""

MIN_GONE_RATIO = 5
"""Length of the newest absence over the longest earlier absence. An expert that is chosen with probability p at each
step has been away for 1.5 / p after two absences, and is away for 7.5 / p once in 2,000 times."""


def is_side_by_side(history: History) -> NDArray[np.bool_]:
    """Return which tensors lie in one of several parallel modules, of shape (L,)."""
    parents = tuple(f"{event.layer}." for event in events_of(history, SIDE_BY_SIDE))
    return np.array([layer.name.startswith(parents) for layer in history.info.layers])


def live_frac_of_siblings(history: History, name: str, newest_L: Floats) -> float | None:
    """Return the fraction of a module and its siblings with a gradient, 0..1; None without siblings."""
    for event in events_of(history, SIDE_BY_SIDE):
        if event.layer is None or not name.startswith(f"{event.layer}."):
            continue
        place = event.layer.count(".") + 1  # position of the sibling's name in the parts of a tensor name
        inside = [i for i, la in enumerate(history.info.layers) if la.name.startswith(f"{event.layer}.")]
        alive = {history.info.layers[i].name.split(".")[place] for i in inside if newest_L[i] > 0}
        return len(alive) / event.values["modules"]
    return None


def comes_and_goes(history: History, group: list[int]) -> bool:
    """Return whether the gradient of a group comes and goes without a much longer absence than before."""
    is_away_T = ~np.any(history.param.window("grad.l2")[:, group] > 0, axis=1)
    away = [end - start for start, end in runs_of(is_away_T)]
    turns = int(np.count_nonzero(is_away_T[1:] != is_away_T[:-1]))
    is_gone = is_away_T[-1] and away[-1] >= MIN_GONE_STEPS and away[-1] >= MIN_GONE_RATIO * max(away[:-1], default=0)
    return turns >= MIN_TURNS and not is_gone
