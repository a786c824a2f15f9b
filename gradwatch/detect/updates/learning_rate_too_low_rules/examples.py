"""Make runs with rates that are too low, and near misses, as examples for `learning_rate_too_low`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gradwatch.history.ending import Ending
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic


def make_slowed(*, factor: float) -> tuple[History, tuple[str, ...]]:
    """Return a run in which a layer has `factor` times the rate of the others, and the name of the layer."""
    made = Synthetic(steps=60).own_rate(4, factor=factor)
    return made.history(), made.names(4)


def make_slow(*, fall: float = 0.03, apart: float = 0.0) -> History:
    """Return a run of 240 steps in which the weights move by 5 %, and the loss falls along a line.

    Args:
        fall: Fall of the loss, as a fraction.
        apart: Spread of the first sizes of the weights, as a fraction.
    """
    made = Synthetic(steps=240, optimizer="Adam", lr=1e-4)
    made.loss_T[:] = 2.3 * (1 - fall * made.t_T / made.steps)
    made.weight_l2_TL *= 1 + apart * np.linspace(-1, 1, made.layers)
    return made.history()


def make_stuck(*, lr: float, opened: float = 1.0) -> History:
    """Return a run at rate `lr` in which the last matrix starts near zero and moves `opened` times more."""
    made = Synthetic(steps=60, lr=lr)
    made.loss_T[:] = 2.3
    if opened > 1:
        made.weight_l2_TL[:, -1] = 1e-3
        made.update_factor_TL[:, -1] = opened
    return made.history()


def make_outweighed(*, share: float = 0.01, lr: float = 1e-3) -> History:
    """Return a run whose updates are about `share` of the rate, with weights of unit variance."""
    made = Synthetic(steps=60, lr=lr, optimizer="AdamW")
    made.update_factor_TL[:] = share
    made.loss_T[:] = 2.3
    return made.history()


def make_looked_up(*, lr: float, unread: float) -> History:
    """Return a run with embeddings only, in which each batch leaves a fraction `unread` of the rows unread."""
    made = Synthetic(steps=60, lr=lr)
    made.info = replace(made.info, layers=tuple(replace(i, module_type="Embedding") for i in made.info.layers))
    made.zero_frac_TL[:] = unread
    made.loss_T[:] = 2.3
    return made.history()


def make_decayed(*, over: float) -> History:
    """Return a run in which the rate falls tenfold every `over` / 2 steps."""
    made = Synthetic(steps=200)
    made.lr_T *= 10.0 ** (-np.maximum(made.t_T - 200 + 1.1 * over if over > 50 else made.t_T, 0) / over * 2)
    made.loss_T[:] = np.maximum(made.loss_T, 0.8)
    return made.history()


def make_warming(*, over: float = 1.0, doubling: float = 0.0, planned: int | None = None) -> History:
    """Return a run in which the rate rises linearly over `over` steps, or doubles every `doubling` steps."""
    made = Synthetic(steps=120)
    made.info = replace(made.info, total_steps=planned)
    made.lr_T = 1e-8 * 2 ** (made.t_T / doubling) if doubling else 1e-3 * (made.t_T + 1) / over
    made.loss_T[:] = 2.3
    return made.history()


def make_scheduled(*, peak: float, warm_up: int = 20, is_finished: bool = False) -> History:
    """Return a run whose schedule multiplies a rate of 0.003 by a factor that rises to `peak`, and then falls."""
    made = Synthetic(steps=60)
    made.info = replace(made.info, initial_rates=(3e-3,))
    rising_T, falling_T = np.minimum((made.t_T + 1) / warm_up, 1), 0.5 * (1 + np.cos(np.pi * made.t_T / 160))
    made.lr_T = 3e-3 * peak * rising_T * falling_T
    made.loss_T[:] = 2.3
    history = made.history()
    history.ending = Ending(kind="finished") if is_finished else None
    return history


def make_thrown() -> History:
    """Return a run with SGD in which the gradients are gone after the first update."""
    made = Synthetic(steps=60, optimizer="SGD", lr=0.1)
    made.grad_l2_TL[1:] *= 1e-6
    made.loss_T[:] = 2.3
    return made.history()


def make_vanishing() -> History:
    """Return a run in which gradients vanish towards the input, so that only the first layers hardly move."""
    made = Synthetic(steps=60, optimizer="SGD", lr=0.1).vanishing(decades=9)
    return made.history()
