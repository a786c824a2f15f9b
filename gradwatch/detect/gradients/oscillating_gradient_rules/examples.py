"""Make runs with batches of several kinds, or with swinging norms, as examples for `oscillating_gradient`."""

from __future__ import annotations

import numpy as np

from gradwatch.events import CLASSES
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic


def make_sorted_classes(*, gradient: float, loss: float) -> History:
    """Return a run over ten classes with a given gradient of the output bias and a relative loss."""
    made = Synthetic(steps=80)
    made.add_event(CLASSES, layer=made.names(11)[0], text="of ten", values={"samples": 32.0, "classes": 10.0})
    made.loss_T[:] = 2.3 * np.where(made.t_T > 0, loss, 1.0)
    made.grad_l2_TL[:, 11] = gradient
    return made.history()


def make_two_sources(*, learned: float, apart: float = 40, period: int = 2) -> Synthetic:
    """Return a run with larger gradients once per period; the loss of the other batches ends at `learned`."""
    made = Synthetic(steps=140)
    is_loud_T = made.t_T % period == 1
    made.grad_l2_TL[is_loud_T] *= apart
    made.loss_T[:] = np.where(is_loud_T, np.maximum(20.0 * 0.9**made.t_T, 0.8), 2.3)
    made.loss_T[~is_loud_T & (made.t_T >= 20)] = 2.3 * learned
    return made


def make_bouncing(*, period: int, level: float = 0.9, growth: float = 0.0) -> Synthetic:
    """Return a run in which norm and loss swing together, while the loss stays in place or grows."""
    made = Synthetic(steps=140).oscillating(factor=60, onset=12, period=period)
    made.loss_T[12:] = level * np.exp(growth * made.t_T[12:] + 2 * np.sin(2 * np.pi * (made.t_T[12:] + 0.5) / period))
    return made
