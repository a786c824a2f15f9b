"""Find a loss without a minimum: it falls below zero ever faster while gradient and weights grow.

A loss with a minimum flattens out, and its gradient shrinks on the way there. A loss without a minimum grows with its
gradient: an unbounded dual of a distance over functions, or an error with the wrong sign.

Wrong for a model with an adversary between it and its loss, which may let the loss fall.
"""

# T = steps of a window, B = quarters of it, M = weight matrices and kernels

from __future__ import annotations

import numpy as np

from gradwatch.detect.features.baseline import first_measured, first_steps
from gradwatch.detect.features.consequences import is_consequence
from gradwatch.detect.features.events import events_of
from gradwatch.detect.features.finding import Sign, format_factor
from gradwatch.detect.features.robust_stats import block_medians, median
from gradwatch.detect.features.structure import NEAR_ZERO_GAIN, structure_of
from gradwatch.detect.gradients.exploding_gradient_rules.climb import NORM
from gradwatch.events import ADVERSARY
from gradwatch.history.store import History
from gradwatch.history.table import WINDOW
from gradwatch.records import Quantity, Severity

FIRST_STEPS = 8
"""Number of first steps that give the initial size of the loss and the gradient."""


def find_unbounded_loss(
    history: History, *, kind: str, growth: float, steps: int, acceleration: float, weight_growth: float
) -> Sign | None:
    """Return a sign if the loss falls ever faster below zero, far out of proportion to the first steps.

    Args:
        history: History of the run.
        kind: Kind of the resulting finding.
        growth: Minimum size of the loss, and of the gradient norm, in units of the first ones.
        steps: Minimum number of steps.
        acceleration: Minimum fall of the loss in the second half of the window over the fall in the first half, and
            growth of the gradient norm between the halves.
        weight_growth: Minimum size of the median weight matrix over its first size.
    """
    # cheap: a loss above zero ends the check, and an adversary may lower the loss
    if not history.run.newest("loss")[0] < 0 or any(events_of(history, ADVERSARY)):
        return None
    loss_T, norm_T = history.scalar("loss", WINDOW), history.scalar(NORM, WINDOW)
    if len(loss_T) < max(steps, 4):  # a step in each quarter
        return None
    first_loss, first_norm = (float(median(np.abs(first_steps(history, name, FIRST_STEPS)))) for name in ("loss", NORM))
    loss_B, norm_B = (block_medians(values_T, len(values_T) // 4)[-4:] for values_T in (loss_T, norm_T))
    loss, norm = float(loss_B[-1]), float(norm_B[-1])
    if not (-loss >= growth * first_loss > 0 and norm >= growth * first_norm > 0):
        return None
    is_faster = loss_B[1] - loss >= acceleration * (loss_B[0] - loss_B[1]) > 0 and (np.diff(loss_B) < 0).all()
    weights = _growth(history)
    if not is_faster or norm < acceleration * norm_B[1] or not weights >= weight_growth:
        return None
    return Sign(
        "the loss falls below zero faster and faster, and the gradient norm has grown "
        f"{format_factor(norm / first_norm)}-fold: the loss is unbounded below",
        (
            Quantity(key="loss.newest_quarter", label="median loss of the newest quarter", value=loss),
            Quantity(key="loss.by_first_size", label="loss / first loss", value=loss / first_loss),
            Quantity(key="grad_norm.newest_quarter", label=f"median {NORM} of the newest quarter", value=norm),
            Quantity(key="grad_norm.first", label=f"median {NORM} of the first 8 steps", value=first_norm),
            Quantity(key="weight.l2.growth", label="median weight norm / first weight norm", value=weights),
        ),
        severity=Severity.INFO if is_consequence(history, kind) else Severity.CRITICAL,
    )


def _growth(history: History) -> float:
    """Return the size of the median weight matrix in units of its first size, or nan if all started near zero."""
    structure = structure_of(history)
    first_M = first_measured(history, "weight.l2")[structure.matrices.indices_M]
    size_TM = history.param.window("weight.l2")[:, structure.matrices.indices_M]
    has_size_M = first_M > NEAR_ZERO_GAIN * structure.matrices.signal_norm_M
    known_T = np.flatnonzero(~np.isnan(size_TM).all(axis=1))
    if not has_size_M.any() or not len(known_T):
        return float("nan")
    return float(median(size_TM[known_T[-1], has_size_M] / first_M[has_size_M]))
