"""Make runs in which parameters get no gradient, and near misses, as examples for `no_gradient`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.history.synthetic.edit import with_statistic


def make_penalized(*, noise: float = 0.0) -> tuple[History, tuple[str, ...]]:
    """Return a run in which the gradient of two layers is a fixed part of their weights, with noise."""
    made = Synthetic(steps=40)
    made.grad_l2_TL[:, :2] = 2e-6 * made.weight_l2_TL[:, :2] * (1 + noise * made.rng.standard_normal((40, 2)))
    return made.history(), made.names((0, 1))


def make_adapted() -> tuple[History, tuple[str, ...]]:
    """Return a run whose first layers are frozen, and whose last two get no gradient."""
    made = Synthetic(steps=40).no_gradient(None, zero=True)
    last = len(made.info.layers) - 2
    layers = tuple(replace(layer, trainable=i >= last) for i, layer in enumerate(made.info.layers))
    made.info = replace(made.info, layers=layers)
    return made.history(), ("layers",)


def make_second(*, starts: int, is_cut: bool = False) -> History:
    """Return a run whose last two layers have an optimizer of their own, which begins to step late."""
    made = Synthetic(steps=80)
    made.rates.append(1.0)
    layers = tuple(replace(layer, group=int(i >= 10)) for i, layer in enumerate(made.info.layers))
    made.info = replace(made.info, layers=layers)
    made.grad_l2_TL[:starts, 10:] = np.nan
    if is_cut:
        made.no_gradient(11)
    rate_T1 = np.where(made.t_T < starts, np.nan, 1e-3)[:, None]
    return with_statistic(made.history(), "lr.1", rate_T1, missing=True)


def make_zero() -> tuple[History, tuple[str, ...]]:
    made = Synthetic(steps=40).no_gradient(4, zero=True)
    return made.history(), made.names(4)


def make_shift() -> tuple[History, tuple[str, ...]]:
    made = Synthetic(steps=40).no_gradient(4, zero=True)
    homes = {3: ("critic.parametrizations.weight", "original"), 4: ("critic", "bias")}
    layers = list(made.info.layers)
    for i, (module, name) in homes.items():
        layers[i] = replace(layers[i], name=f"{module}.{name}", module=module, shape=(64, 64) if i == 3 else (64,))
    made.info = replace(made.info, layers=tuple(layers))
    return made.history(), ("critic.bias",)


def make_unowned(*, copied: bool = False, moves: bool = False) -> History:
    """Return a run with a layer that no optimizer holds; all other layers start with the same norm."""
    made = Synthetic(steps=60).no_gradient(4)
    layers = tuple(replace(layer, group=None if i == 4 else 0) for i, layer in enumerate(made.info.layers))
    made.info = replace(made.info, layers=layers)
    made.weight_l2_TL[:, 4] = (1.0 if copied else 0.9) * made.weight_l2_TL[0, 3] * (1 + 1e-4 * moves * made.t_T)
    return made.history()


def make_moved(*, once: bool = False) -> History:
    """Return a run of 60 steps with a layer that has no gradient, and that moves at every step, or once."""
    made = Synthetic(steps=60).no_gradient(4)
    made.weight_l2_TL[:, 4] = np.where(made.t_T < 15, 1, 2) if once else 1 + 1e-4 * made.t_T
    return made.history()
