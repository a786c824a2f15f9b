"""Make runs in which one part of the model dominates the gradient, as examples for `layer_imbalance`."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic


def make_unscaled_inputs(size: float, *, others: float, least: float | None = None) -> tuple[History, tuple[str, ...]]:
    """Return a run with a layer with inputs of a size, and given norms of the other gradients."""
    made = Synthetic(steps=40)
    made.grad_l2_TL[:] = others / math.sqrt(10) * np.linspace(0.9, 1.1, 40)[:, None]
    weight = made.info.layers[0]
    bias = replace(weight, name="layers.0.bias", shape=weight.shape[:1])
    made.info = replace(made.info, layers=(weight, bias, *made.info.layers[2:]))
    made.grad_l2_TL[:, 5] = made.grad_l2_TL[:, 5] if least is None else least
    made.grad_l2_TL[:, :2] = 1.0, 1 / (size * math.sqrt(weight.shape[1]))
    return made.history(), ("layers.0",)


def make_outgrown(*, rate: float, most: float = 1e9, rest: bool = False) -> tuple[History, tuple[str, ...]]:
    """Return a run in which the gradients of the first three layers, or of the rest, change by a factor per step."""
    made = Synthetic(steps=81)
    part = slice(3, None) if rest else slice(3)
    made.grad_l2_TL[:, part] *= np.clip(rate**made.t_T, 1 / most, most)[:, None]
    return made.history(), made.names(range(3))
