"""Make runs with rates that are too high, and near misses, as examples for `learning_rate_too_high`."""

from __future__ import annotations

import numpy as np

from gradwatch.events import CLIPPED_LATE, FREEZE_IGNORED
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic


def make_jump(*, loss: float, first: float = 0.001) -> History:
    """Return a run whose rate jumps tenfold at step 60, and whose loss is multiplied by `loss` from then on."""
    made = Synthetic(steps=90)
    made.lr_T[:40], made.lr_T[40:60], made.lr_T[60:] = first, 0.001, 0.01
    made.loss_T[60:] *= loss
    return made.history()


def make_compounding(*, linear: bool = False, falls: bool = False) -> History:
    """Return a run that learns at once while its rate grows without end."""
    made = Synthetic(steps=120)
    made.lr_T = made.lr_T * (1 + 0.5 * made.t_T if linear else 1.04**made.t_T)
    made.loss_T[:] = 2.3 * np.maximum(np.exp(-made.t_T / 10), 0.1)
    if falls:
        made.loss_T[10:] *= np.exp(-0.01 * (made.t_T[10:] - 10))
    return made.history()


def make_restarting() -> History:
    """Return a run whose rate falls to a twentieth and returns to its start."""
    made = Synthetic(steps=62, optimizer="SGD", lr=20.0)
    made.lr_T[:40] *= 1 - 0.95 * made.t_T[:40] / 40
    made.loss_T[40:] *= 4
    return made.history()


def make_late_clipping(*, factor: float) -> History:
    """Return a run whose first gradients are clipped after their updates."""
    values = {"updates": 15.0, "factor": factor}
    return Synthetic(steps=40).add_event(CLIPPED_LATE, step=20, text="clipped late", values=values).history()


def make_ignored() -> History:
    """Return a run whose first layer was to be frozen by an attribute that torch does not read."""
    made = Synthetic(steps=40)
    return made.add_event(FREEZE_IGNORED, layer="layers.0.weight", text="not read", values={"tensors": 2.0}).history()


def make_running_away(*, lr: float, steps: int = 12, finite: int = 12) -> History:
    """Return a run whose loss grows fourfold at each step."""
    made = Synthetic(steps=steps, optimizer="SGD", lr=lr)
    made.loss_T[:] = 2.3 * 4.0**made.t_T
    made.loss_T[finite:] = np.inf
    return made.history()


def make_overwritten() -> History:
    """Return a run of one step whose update is far larger than the weights."""
    made = Synthetic(steps=1)
    made.update_factor_TL[:] = 1e4
    return made.history()


def make_own_rate(*, factor: float, first: float = 1.0) -> tuple[History, tuple[str, ...]]:
    """Return a run in which a layer has `factor` times the rate of the others, and the name of the layer.

    Args:
        factor: Rate of the layer over the rate of the others.
        first: First norm of its weights, in units of the usual.
    """
    made = Synthetic(steps=60, lr=0.01).own_rate(4, factor=factor)
    made.weight_l2_TL[0, 4] *= first
    return made.history(), made.names(4)


def make_thrown(*, height: float, every: int = 1) -> History:
    """Return a run whose loss rises by a factor from step 30 to 60, at all steps or at single ones."""
    made = Synthetic(steps=90)
    is_high_T = (made.t_T >= 30) & (made.t_T < 60) & (made.t_T % every == 0)
    made.loss_T[is_high_T] *= height
    made.update_factor_TL[:] = 0.2 / 1e-3
    return made.history()
