"""Make runs with exploding gradients, and near misses, as examples for `exploding_gradient`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gradwatch.events import HEADS, EventKind
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic


def make_falling_loss(*, norm: float = 1.5, held: int = 1000, grown: float = 0.01) -> History:
    """Return a run in which the loss falls below zero while gradients and weights grow, until step `held`."""
    made = Synthetic(steps=200)
    time_T = np.minimum(made.t_T, held) + 1.0
    made.loss_T = -0.01 * time_T**2.5
    made.weight_l2_TL *= 1 + grown * time_T[:, None]
    made.grad_l2_TL *= (time_T**norm / made.signal_T)[:, None]
    return made.history()


def make_gain(
    decades: float, *, event: EventKind | None = None, other_head: bool = False
) -> tuple[History, tuple[str, ...]]:
    """Return a run in which the gradient of the output bias, the last tensor, is `decades` below the others.

    Another head, the layer before it, may have a bias of its own, with a usual gradient.
    """
    made = Synthetic(steps=30)
    bias = replace(made.info.layers[-1], name="layers.10.bias", module="layers.10", shape=(64,))
    made.info = replace(made.info, layers=(*made.info.layers[:-1], bias))
    made.grad_l2_TL[:, -1] = np.median(made.grad_l2_TL[:, :-1], axis=1) * 10**-decades
    made.grad_l2_TL[:, 4] *= 10
    if event is not None:
        made.add_event(event)
    if other_head:
        bias = replace(made.info.layers[8], name="layers.9.bias", module="layers.9", shape=(64,))
        made.info = replace(made.info, layers=(*made.info.layers[:8], bias, *made.info.layers[9:]))
        made.add_event(HEADS, values={"layers.9.weight": 9, "layers.10.weight": 10})
    return made.history(), made.names(4)


def make_levels(high: float, *, low: float = 1.0, clipped: bool = False, in_turn: bool = False) -> History:
    """Return a run in which loss and gradient are `high` times their usual size at a third of the steps.

    Args:
        high: Factor at these steps.
        low: Factor at all other steps.
        clipped: Whether the norms are those after clipping.
        in_turn: Whether it is every third step, and not one in three by chance.
    """
    made = Synthetic(steps=120)
    is_high_T = made.t_T % 3 == 1 if in_turn else made.rng.random(120) < 1 / 3
    level_T = np.where(is_high_T, high, low)
    made.loss_T *= level_T
    made.grad_l2_TL *= (np.minimum(level_T, 1.0) if clipped else level_T)[:, None]
    return made.history()
