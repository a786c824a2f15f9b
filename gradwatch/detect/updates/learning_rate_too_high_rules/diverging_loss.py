"""Find a loss that rises from the first update on, possibly until it is not finite."""

# T = steps of a window, W = weight matrices and kernels, or embeddings if there are no others

from __future__ import annotations

import numpy as np

from gradwatch.detect.features.baseline import first_measured
from gradwatch.detect.features.finding import Sign, format_factor
from gradwatch.detect.features.structure import structure_of
from gradwatch.history.store import History
from gradwatch.records import Quantity

FIRST_STEPS = 20
"""Steps of the run in which the loss must diverge."""


def find_diverging_loss(history: History, *, runaway: float, large: float, rising: int) -> Sign | None:
    """Return the sign of a loss at `runaway` times the first, if the first update was at least `large`.

    The loss must have risen at each of the last `rising` steps.
    """
    if history.step >= FIRST_STEPS:
        return None
    loss_T = history.scalar("loss", FIRST_STEPS)
    # up to the first loss that is not finite; the appended False ends a run of finite losses
    loss_T = loss_T[: np.argmin(np.append(np.isfinite(loss_T), False))]
    if len(loss_T) <= rising or not loss_T[-1] >= runaway * loss_T[0] > 0:
        return None
    weights_W = structure_of(history).rate_weights.indices_W
    ratio = float(np.fmax.reduce(first_measured(history, "update.ratio")[weights_W], initial=-np.inf))
    if not (np.diff(loss_T[-rising - 1 :]) > 0).all() or not ratio >= large:
        return None
    rate, times = float(history.run.newest("lr.0")[0]), float(loss_T[-1] / loss_T[0])
    return Sign(
        f"the loss has grown {format_factor(times)}-fold since the first update, at a learning rate of {rate:g}",
        (
            Quantity(key="loss.by_first", label="loss / first loss", value=times),
            Quantity(key="update.ratio.first_max", label="largest update.ratio of the first update", value=ratio),
            Quantity(key="lr.0", value=rate),
        ),
        # the rise began before the losses that prove it
        since=int(history.run.steps(FIRST_STEPS)[len(loss_T) - 1]) - rising,
    )
