"""Compute the values of layers that an experiment tracker shows: a fixed number, however many layers there are."""

# M = layers

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradwatch.history.store import History
from gradwatch.records import Finding
from gradwatch.render.common.layers import Layer, norms_now, update_ratios

QUANTILES = {"min": 0.0, "p10": 0.1, "median": 0.5, "p90": 0.9, "max": 1.0}
MAX_PER_FINDING = 3
"""Maximum number of layers that one finding adds. A finding may have hundreds of layers with similar curves."""


def quantiles(history: History, of: Sequence[Layer]) -> dict[str, float]:
    """Return quantiles over the layers of the gradient norm at the newest step, by tag."""
    norms_M = norms_now(history, of)
    usable_M = norms_M[np.isfinite(norms_M)]
    if not usable_M.size:
        return {}
    values = np.quantile(usable_M, list(QUANTILES.values())).tolist()
    return {f"layers/grad_norm_{name}": value for name, value in zip(QUANTILES, values, strict=True)}


def layer_points(history: History, of: Sequence[Layer]) -> dict[str, float]:
    """Return the finite gradient norms and update/weight ratios of some layers, by tag."""
    points = {}
    for group, values_M in (("grad_norm", norms_now(history, of)), ("update_ratio", update_ratios(history, of))):
        for layer, value in zip(of, values_M.tolist(), strict=True):
            if np.isfinite(value):
                points[f"layers/{group}/{layer.name}"] = value
    return points


def layers_of(finding: Finding, layers: Sequence[Layer]) -> list[Layer]:
    """Return the first layers of a finding, at most `MAX_PER_FINDING`."""
    found: list[Layer] = []
    for name in finding.names:
        layer = next((layer for layer in layers if name in layer.names), None)
        if layer is not None and layer not in found:
            found.append(layer)
        if len(found) == MAX_PER_FINDING:
            break
    return found
