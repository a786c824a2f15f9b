"""Decide whether a missing gradient may still come: to an expert, or to a head that waits for its turn."""

# T = steps of a window, L = parameter tensors

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from gradwatch.history.store import History


def is_like_expert(history: History, affected_L: NDArray[np.bool_]) -> bool:
    """Return whether tensors without gradient look like experts.

    Experts are numbered like tensors with a gradient, and come after some of them. A cut in a chain of numbered blocks
    leaves no gradient before the cut.
    """
    layers = history.info.layers
    reached = [i for i, layer in enumerate(layers) if layer.trainable and not affected_L[i]]
    numbered = {re.sub(r"\d+", "*", layers[i].name) for i in reached}
    affected = np.flatnonzero(affected_L)
    is_like_others = all(re.sub(r"\d+", "*", layers[i].name) in numbered for i in affected)
    return is_like_others and len(reached) > 0 and len(affected) > 0 and reached[0] < affected[0]


def is_in_turn_of(l2_TL: NDArray[np.floating], in_turn_L: NDArray[np.bool_], missing_L: NDArray[np.bool_]) -> bool:
    """Return whether other tensors come and go, so that a missing gradient may still come.

    If they come and go as exact zeros, the graph is the same at every step, as with experts that have masked outputs. A
    gradient that is None in such a graph stays None.
    """
    is_graph_same = not np.isnan(l2_TL[:, in_turn_L]).any()
    return bool(in_turn_L.any()) and not (is_graph_same and missing_L.any())
