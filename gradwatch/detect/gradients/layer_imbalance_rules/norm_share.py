"""Find the module that makes up nearly all of the total norm, and so uses up the clipping limit.

Clipping scales all gradients by the total norm. If one module makes up nearly all of that norm, clipping cuts the other
gradients by as much and leaves almost nothing of them. Parameters that are neither matrices nor biases also count
without clipping if they have nearly all of the norm.
"""

# T = steps of a window, L = parameter tensors, P = other parameters

from __future__ import annotations

import numpy as np

from gradwatch.detect.features.finding import Sign
from gradwatch.detect.features.robust_stats import median
from gradwatch.detect.features.scope import module_of
from gradwatch.detect.features.structure import structure_of
from gradwatch.detect.gradients.layer_imbalance_rules.own_rate import has_lower_rate
from gradwatch.history.store import History
from gradwatch.records import Quantity, Severity

BEFORE, AFTER = "grad_norm.before_clip", "grad_norm.after_clip"

CLIPPED_SPREAD = 1e-3
"""Spread of a norm, relative to the norm, that only clipping leaves: such a norm was read after clipping."""

MIN_SHARE = 0.5
"""Share of the total norm at which a tensor, together with others of its module, may have nearly all of it."""


def find_norm_taker(history: History, *, steps: int, rest: float, decades: float) -> Sign | None:
    """Return a sign for the module with nearly all of the norm.

    Args:
        history: History of the run.
        steps: Newest steps at each of which the module must have it.
        rest: Maximum norm of all other gradients over the module's norm, if clipping cuts the norm.
        decades: Distance of the other gradients below the module without clipping, in powers of ten.
    """
    is_clipped, other_params_P = _is_clipped(history, steps), structure_of(history).other_params_P
    if not is_clipped:
        norm = history.run.newest(BEFORE)[0]
        if not len(other_params_P):
            return None
        if not (history.param.newest("grad.l2")[other_params_P] >= MIN_SHARE * norm).any():
            return None
    if not history.info.layers:
        return None
    l2_TL = np.nan_to_num(history.param.window("grad.l2", steps), posinf=0)  # an infinite one has all of the norm
    top = int(median(l2_TL).argmax())
    infos = history.info.layers
    mine_L = np.array([info.module == infos[top].module != "" or info is infos[top] for info in infos])
    others_T, own_T = (np.linalg.norm(l2_TL[:, part].astype(np.float64), axis=1) for part in (~mine_L, mine_L))
    # `tiny` avoids a division by 0
    rest_T = others_T / np.maximum(own_T, np.finfo(np.float32).tiny)
    # a rule that does not apply has the limit 0
    limits = (is_clipped * rest, (top in other_params_P) * 10**-decades)
    if len(l2_TL) < steps or not 0 < rest_T.min() <= rest_T.max() <= max(limits):
        return None
    layer, part = module_of(history, top), f"at most {100 * rest_T.max():.2g} %"
    shown = AFTER if is_clipped else BEFORE
    return Sign(
        f"the gradient of {layer} uses up the clipping limit: all other layers together get {part} of the norm"
        if is_clipped
        else f"all other gradients together have {part} of the gradient norm of {layer}",
        (
            Quantity(
                key="imbalance.others_by_own",
                label="norm of all other gradients / norm of this one",
                value=float(rest_T.max()),
            ),
            Quantity(key=shown, value=float(history.scalar(shown, 1)[0])),
        ),
        layer=layer,
        severity=Severity.INFO if has_lower_rate(history, top) else None,
    )


def _is_clipped(history: History, steps: int) -> bool:
    """Return whether clipping has cut the gradient at each of the newest steps."""
    before_T, after_T = history.scalar(BEFORE, steps), history.scalar(AFTER, steps)
    kept = 1 - CLIPPED_SPREAD
    if after_T[-1] < kept * before_T[-1] and (after_T < kept * before_T).all():
        return True
    first, newest = float(before_T[0]), float(before_T[-1])
    if not abs(newest - first) <= CLIPPED_SPREAD * first:  # cheap: the norm is not constant
        return False
    return bool(np.ptp(before_T) <= CLIPPED_SPREAD * before_T.min())
