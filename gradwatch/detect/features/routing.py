"""Read how routers spread their tokens over the experts of a mixture."""

# T = samples of the activations

from __future__ import annotations

import numpy as np

from gradwatch.detect.features.robust_stats import Floats
from gradwatch.history.store import History

ROUTING = "Routing"
"""Type of the activation that is the choice of a router. Its units are experts, and its outputs their tokens."""


def routings(history: History) -> dict[int, str]:
    """Return the names of the routers by the index of their choice among the activations."""
    suffix = f".{ROUTING.lower()}"
    return {
        a: activation.name.removesuffix(suffix)
        for a, activation in enumerate(history.info.activations)
        if activation.module_type == ROUTING
    }


def num_used(history: History, activation: int) -> Floats:
    """Return the number of equal experts that would take the tokens as unevenly, at each sample, of shape (T,).

    It is 1 over the sum of squared shares, so 1 if one expert gets all tokens, and the number of experts if they share
    equally. A sample without tokens has nan.
    """
    mean_T, std_T, units_T = (history.act.window(f"act.{name}")[:, activation] for name in ("mean", "std", "units"))
    with np.errstate(invalid="ignore", divide="ignore"):
        used_T: Floats = units_T / (1 + (std_T / mean_T) ** 2)
    return used_T
