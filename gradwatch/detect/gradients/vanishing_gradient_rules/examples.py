"""Make runs with vanishing gradients, and near misses, as examples for `vanishing_gradient`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gradwatch.events import RECURRENCE
from gradwatch.history.synthetic.builder import Synthetic


def make_gated() -> Synthetic:
    """Return a run with filter and gate per layer, in which gradients vanish and gates get 1/100 of them."""
    made = Synthetic(steps=40).vanishing(decades=5)
    made.grad_l2_TL[:, 1:-1:2] *= 0.01
    names = [f"blocks.{i // 2}.{('filter', 'gate')[i % 2]}" for i in range(11)]
    layers = (replace(la, name=f"{n}.weight", module=n) for la, n in zip(made.info.layers, names, strict=False))
    made.info = replace(made.info, layers=(*layers, made.info.layers[-1]))
    return made


def make_forgetful() -> Synthetic:
    """Return a run of a recurrence with gradients that vanish on their way back."""
    values = {"uses": 80.0, "growth": -20.0}
    return Synthetic(steps=80).add_event(RECURRENCE, layer="layers.3.weight", values=values)


def make_in_turn() -> Synthetic:
    """Return a run of two models that are trained in turn; the first gets far smaller gradients."""
    made = Synthetic(steps=40).vanishing(decades=6)
    made.grad_l2_TL[:35, 6:] = made.grad_l2_TL[35:, :6] = np.nan
    return made
