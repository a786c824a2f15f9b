"""Make runs with units that fall silent, and near misses, as examples for `rising_sparsity`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic


def make_with_bias(*, cancels: bool) -> History:
    """Return a run in which the gradient of a bias gets sparser, with or without its weights."""
    made = Synthetic(steps=200).rising_sparsity(7, onset=10, rate=0.004)
    weight = made.info.layers[6]
    bias = replace(weight, name="layers.6.bias", shape=weight.shape[:1])
    made.info = replace(made.info, layers=(*made.info.layers[:7], bias, *made.info.layers[8:]))
    if not cancels:
        made.rising_sparsity(6, onset=10, rate=0.004)
    return made.history()


def make_silenced(rate: float, *, most: float = 0.9, wave: float = 0.0) -> History:
    """Return a run in which units of a ReLU fall silent at `rate` per step from step 20, on top of a wave."""
    made = Synthetic(steps=240, activations=3)
    dead_T = 0.02 + rate * np.maximum(made.t_T - 20, 0) + wave * (1 + np.sin(made.t_T / 15))
    made.dead_frac_TA[:, 1] = np.minimum(dead_T, most)
    return made.history()


def make_settled() -> History:
    """Return a run in which a quarter of the units fall silent in eight steps, and others fire ever more rarely."""
    made = Synthetic(steps=160)
    fallen_T = 0.25 * np.minimum(made.t_T / 8, 1) + 0.25 * np.maximum(made.t_T - 16, 0) / 144
    made.zero_frac_TL[:, 6] = 0.1 + fallen_T
    return made.history()
