"""A loss that falls below zero faster and faster, as gradient and weights grow along: it has no least value."""

# T = steps of a window, B = quarters of it, M = weight matrices and kernels

from __future__ import annotations

import numpy as np

from gradwatch.detect.features.baseline import beginning
from gradwatch.detect.features.events import noted
from gradwatch.detect.features.finding import Sign
from gradwatch.detect.features.robust_stats import block_medians, median
from gradwatch.detect.features.structure import NEAR_ZERO, depth
from gradwatch.detect.features.words import factor
from gradwatch.events import ADVERSARY
from gradwatch.history.store import History
from gradwatch.history.table import WINDOW
from gradwatch.records import Quantity

FIRST = 8
"""Steps that say how large the loss and the gradient were."""

STEPS = 64
"""Steps below which a fall that gathers speed may be the end of a plateau."""

FASTER = 2.0
"""Fall in the second half of the window, in units of that in the first, that gathers speed: a straight line has 1, what
comes to a bound less. The gradient has to grow by as much from the one to the other."""

LARGER = 1.5
"""Size of the median weight matrix, in units of its first, that shows it to grow along: what leaves a saddle grows out
of one small layer, and the others stay what they are."""

NORM = "grad_norm.before_clip"


def falls_without_end(history: History, *, growth: float) -> Sign | None:
    """Return that the loss falls ever faster below zero, both it and the gradient beyond all proportion to the first.

    A loss with a least value flattens out, and its gradient gets smaller on the way there. One without, as the dual of
    a distance over functions that nothing bounds or an error with the wrong sign, grows with its own gradient.

    Args:
        history: Of the run.
        growth: Least size of the loss, and of the gradient norm, in units of the first ones.
    """
    first_loss, first_norm = (float(median(np.abs(beginning(history, name, FIRST)))) for name in ("loss", NORM))
    loss_T, norm_T = history.scalar("loss", WINDOW), history.scalar(NORM, WINDOW)
    if len(loss_T) < STEPS or any(noted(history, ADVERSARY)):
        return None
    loss_B, norm_B = (block_medians(values_T, len(values_T) // 4)[-4:] for values_T in (loss_T, norm_T))
    loss, norm = float(loss_B[-1]), float(norm_B[-1])
    if not (-loss >= growth * first_loss > 0 and norm >= growth * first_norm > 0):
        return None
    is_faster = loss_B[1] - loss >= FASTER * (loss_B[0] - loss_B[1]) > 0 and (np.diff(loss_B) < 0).all()
    weights = _growth(history)
    if not is_faster or norm < FASTER * norm_B[1] or not weights >= LARGER:
        return None
    return Sign(
        f"the loss falls below zero ever faster, and the gradient norm has grown {factor(norm / first_norm)} times "
        "on the way: nothing bounds it",
        (
            Quantity(key="loss.newest_quarter", label="loss, median of the newest quarter", value=loss),
            Quantity(key="loss.by_first_size", label="loss, by the size of the first", value=loss / first_loss),
            Quantity(key="grad_norm.newest_quarter", label=f"{NORM}, median of the newest quarter", value=norm),
            Quantity(key="grad_norm.first", label=f"{NORM}, median of the first 8", value=first_norm),
            Quantity(
                key="weight.l2.growth", label="weight.l2, by the first, median of the weight matrices", value=weights
            ),
        ),
    )


def _growth(history: History) -> float:
    """Return the size of the median weight matrix in units of its first one, nan where all began near zero."""
    shape = depth(history)
    first_M = beginning(history, "weight.l2", 1)[0, shape.matrices_M]  # measured at the first step
    size_TM = history.param.window("weight.l2")[:, shape.matrices_M]
    has_size_M = first_M > NEAR_ZERO * shape.root_fan_out_M
    known_T = np.flatnonzero(~np.isnan(size_TM).all(axis=1))
    if not has_size_M.any() or not len(known_T):
        return float("nan")
    return float(median(size_TM[known_T[-1], has_size_M] / first_M[has_size_M]))
