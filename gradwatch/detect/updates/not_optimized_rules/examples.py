"""Make runs with parameters that are not optimized, and near misses, as examples for `not_optimized`."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from gradwatch.events import (
    COPY_UNCHANGED,
    EMPTY_GROUP,
    UNHELD_KEPT,
    WEIGHTS_CLIPPED,
    WEIGHTS_MOVED,
    WEIGHTS_STILL,
    EventKind,
)
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.history.synthetic.edit import with_statistic


def make_left_out(*layers: int, moves: bool) -> History:
    """Return a run in which some layers are in no group, and move or stay."""
    return _made_without(*layers, moves=moves).history()


def make_event(kind: EventKind, *, layer: str | None = None) -> History:
    """Return a run with an event about one tensor."""
    return Synthetic(steps=20).add_event(kind, layer=layer, text="found", values={"tensors": 1.0}).history()


def make_copied() -> History:
    """Return a run with a target network that is written and keeps its values."""
    values = {"steps": 100.0, "distance": 0.4}
    made = Synthetic(steps=120).add_event(COPY_UNCHANGED, step=110, layer="target", text="found", values=values)
    return made.history()


def make_kept() -> History:
    """Return a run in which the first layer is in no group, and nothing clears its gradient."""
    return _made_without(0, moves=False).add_event(UNHELD_KEPT, layer="layers.0.weight", text="kept").history()


def make_moved(first: int, last: int, *left: int) -> History:
    """Return a run in which some layers are in no group, and the layers from `first` to `last` move."""
    made = _made_without(*(left or range(first, last + 1)), moves=False)
    return made.add_event(WEIGHTS_MOVED, step=1, values={"first": float(first), "last": float(last)}).history()


def make_used_up() -> History:
    """Return a run in which the first layer is in no group, because its group is empty."""
    made = _made_without(0, moves=False)
    return made.add_event(
        EMPTY_GROUP, text="group 0 of the optimizer holds no parameter", values={"group": 0.0}
    ).history()


def _made_without(*layers: int, moves: bool) -> Synthetic:
    made = Synthetic(steps=20)
    infos = tuple(replace(info, group=None) if i in layers else info for i, info in enumerate(made.info.layers))
    made.info = replace(made.info, layers=infos)
    made.update_factor_TL[:, layers] = float(moves)
    return made


def make_frozen(*layers: int) -> History:
    """Return a run in which some layers are frozen and the next layer is left out."""
    made = _made_without(max(layers) + 1, moves=False)
    infos = (replace(la, trainable=False, group=None) if i in layers else la for i, la in enumerate(made.info.layers))
    made.info = replace(made.info, layers=tuple(infos))
    made.grad_l2_TL[:, list(layers)] = np.nan
    return made.history()


def make_thawed(*, moves: bool) -> History:
    """Return a run in which the first layer is frozen for half of the steps."""
    made = _made_without(0, moves=moves)
    made.info = replace(made.info, layers=(replace(made.info.layers[0], trainable=False), *made.info.layers[1:]))
    made.grad_l2_TL[:10, 0] = np.nan
    return made.history()


def make_stale() -> History:
    """Return a run in which the first layer is frozen, with a gradient that never changes."""
    made = _made_without(0, moves=False)
    made.info = replace(made.info, layers=(replace(made.info.layers[0], trainable=False), *made.info.layers[1:]))
    made.grad_l2_TL[:, 0] = 0.125
    return made.history()


def make_own() -> History:
    """Return a run in which no optimizer holds a parameter of the root module."""
    made = _made_without(0, moves=False)
    own = replace(made.info.layers[0], name="log_vars", module="", shape=(2,))
    made.info = replace(made.info, layers=(own, *made.info.layers[1:]))
    return made.history()


def make_at_zero(layer: int) -> History:
    """Return a run in which the group of a layer has a rate of 0."""
    made = Synthetic(steps=60).own_rate(layer, factor=0.0)
    return _still(made, layer).history()


def make_converged(layer: int | None = None, *, left: float = 1e-3, moves: bool = True) -> History:
    """Return a run in which all layers, or one with an optimizer of its own, stop at `left` of the first gradient."""
    made = Synthetic(steps=60)
    if layer is not None:
        made.own_rate(layer, factor=1.0)
    which = slice(None) if layer is None else layer
    made.update_factor_TL[20 if moves else 0 :, which] = 0
    made.weight_l2_TL = made.weight_l2_TL * np.ones((60, 12))
    made.grad_l2_TL[20:, which] *= left
    return made.history()


def make_stopped(*, is_clipped: bool = False, has_left: bool = False, left: float = 1.0) -> History:
    """Return a run in which a layer stops to move: clipping holds it at a bound, it leaves the model, or neither."""
    made = Synthetic(steps=60)
    made.update_factor_TL[20:, 4] = 0
    made.grad_l2_TL[20:, 4] *= left
    made.weight_l2_TL = made.weight_l2_TL * np.ones((60, 12))
    made.weight_l2_TL[20:, 4] = made.weight_l2_TL[19, 4]
    if has_left:
        made.grad_l2_TL[20:, 4] = made.grad_l2_TL[19, 4]
    if is_clipped:
        made.add_event(WEIGHTS_CLIPPED, step=20, values={"first": 3, "last": 4})
    return made.history()


def make_uncalled(*, loss_scale: float = math.nan) -> History:
    """Return a run without a step of the optimizer, perhaps since a scaler skips each."""
    made = Synthetic(steps=60).add_event(WEIGHTS_STILL, step=40, values={"still": 12.0, "held": 12.0, "steps": 41.0})
    made.update_factor_TL[:] = np.nan
    return with_statistic(with_statistic(made.history(), "skipped", 1.0), "loss_scale", loss_scale, missing=True)


def make_ended(*, is_same: bool = True) -> History:
    """Return a run without an update from step 30 on, in which the gradients stay the same or not."""
    made = Synthetic(steps=80)
    made.skipped_T[30:], made.update_factor_TL[30:] = 1, np.nan
    if is_same:
        made.grad_l2_TL[30:] = made.grad_l2_TL[29]
    return made.history()


def make_unmoved(*, rate: float = 1e-3) -> History:
    """Return a run in which no weight changes."""
    made = Synthetic(steps=60)
    made.update_factor_TL[:] = 0
    made.weight_l2_TL = made.weight_l2_TL[0] * np.ones((60, 12))
    made.lr_T = np.full(60, rate)
    return made.history()


def make_stuck(layer: int, *, moves: bool = False) -> History:
    """Return a run in which the updates of a layer are 0, and its norm stays the same unless it `moves`."""
    made = Synthetic(steps=60)
    made.update_factor_TL[:, layer] = 0
    return (made if moves else _still(made, layer)).history()


def _still(made: Synthetic, layer: int) -> Synthetic:
    made.weight_l2_TL[:, layer] = made.weight_l2_TL[0, layer]
    return made
