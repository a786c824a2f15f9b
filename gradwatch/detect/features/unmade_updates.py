"""Tell updates that were not made from updates that are too small, and from an optimizer that has converged."""

# T = steps that measured the updates, L = parameter tensors

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gradwatch.detect.features.baseline import first_measured, first_steps
from gradwatch.detect.features.structure import structure_of
from gradwatch.history.store import Floats, History

RESOLUTION = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}
"""Distance of 1 to the next number, by dtype. An update below half of it is lost in rounding."""

ADAPTIVE = ("Adam", "Adagrad", "RMSprop", "Lion")
"""Parts of the names of optimizers that move weights by about their rate, whatever the size of the gradient."""

MIN_VISIBLE_UNITS = 10.0
"""Size of an update, in that distance, from which rounding cannot lose it in all elements of a tensor."""

CONVERGED_FRAC = 1e-2
"""Gradient norm of an optimizer group, over its first, up to which a stop of the whole group is convergence. Near a
minimum, what the loss can still fall by is the square of it. L-BFGS stops between 1e-4 and 4e-3, where float32 no
longer resolves a smaller loss."""


def are_updates_missing(history: History, *, samples: int) -> bool:
    """Return whether the newest measured updates are exactly 0 in all tensors, although the rate would move them.

    Tensors whose optimizer has converged have nothing left to update, and do not count. An adaptive optimizer moves a
    weight by about its rate, and any other at least by its rate times the gradient.

    Args:
        history: History of the run.
        samples: Number of measured updates that must be 0.
    """
    ratio_TL = history.param.window("update.ratio")
    is_known_T = ~np.isnan(ratio_TL).all(axis=1)
    # cheap: the newest measurement decides in most runs; `nansum` ignores tensors without one
    if np.count_nonzero(is_known_T) < samples or np.nansum(ratio_TL[is_known_T][-samples:]) > 0:
        return False
    length = len(ratio_TL) - int(np.flatnonzero(is_known_T)[-samples])
    if (history.scalar("skipped", length) == 1).any():
        return False
    scale_L = structure_of(history).rms_scale_L
    gradient_L = history.param.newest("grad.l2") / scale_L
    gradient_L = np.where(have_converged(history, ratio_TL[is_known_T][-samples:]), np.nan, gradient_L)
    weight_L = history.param.window("weight.l2")[is_known_T][-1] / scale_L
    is_adaptive = any(name in history.info.optimizer for name in ADAPTIVE)
    step_L = _rates(history) * np.where(gradient_L > 0, 1.0 if is_adaptive else np.minimum(1.0, gradient_L), np.nan)
    units_L = np.array([RESOLUTION.get(layer.dtype, np.inf) for layer in history.info.layers])
    return bool((step_L > MIN_VISIBLE_UNITS * units_L * weight_L).any())  # False for nan: no gradient, no group


def have_converged(history: History, ratio_TL: Floats) -> NDArray[np.bool_]:
    """Return which tensors have moved and then stopped with all of their optimizer group, near a minimum: shape (L,).

    Args:
        history: History of the run.
        ratio_TL: `update.ratio` at the newest measurements.
    """
    gradient_L, first_L = history.param.newest("grad.l2"), first_measured(history, "grad.l2")
    has_moved_L = np.fmax.reduce(first_steps(history, "update.ratio"), axis=0) > 0  # False for nan, as below
    is_still_L = (ratio_TL == 0).all(axis=0)
    group_L = np.array([-1 if layer.group is None else layer.group for layer in history.info.layers])
    converged_L = np.zeros(len(group_L), bool)
    for group in range(history.groups):
        own_L = (group_L == group) & (gradient_L > 0)
        is_near = np.linalg.norm(gradient_L[own_L]) <= CONVERGED_FRAC * np.linalg.norm(first_L[own_L])
        converged_L |= own_L & has_moved_L & is_near & is_still_L[own_L].all()
    return converged_L


def _rates(history: History) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return the learning rate of each tensor, of shape (L,); nan without a group."""
    rates = {g: float(history.run.newest(f"lr.{g}")[0]) for g in range(history.groups)}
    return np.array([np.nan if la.group is None else rates.get(la.group, np.nan) for la in history.info.layers])
