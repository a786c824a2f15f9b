"""Find a run that ended in its warm-up, far below the learning rate that its optimizer was given.

During a run, a warm-up that is too long cannot be distinguished from one that is right, since a loop does not
say how many steps it will make. Only its end shows it.
"""

# T = steps of a window

from __future__ import annotations

import numpy as np

from gradwatch.detect.features.finding import Sign
from gradwatch.detect.updates.learning_rate_too_low_rules.update_levels import is_loss_left
from gradwatch.history.store import History
from gradwatch.records import Quantity


def find_unfinished_warm_up(history: History, *, reached: float, steps: int, left: float) -> Sign | None:
    """Return a sign if the run is finished, and its rate has only risen.

    Args:
        history: History of the run.
        reached: Newest rate, in units of the rate that the optimizer was given, up to which the warm-up was too long.
        steps: Minimum number of steps: a shorter run is a trial.
        left: Part of the first loss that must remain.
    """
    if history.ending is None or history.ending.kind != "finished" or history.step + 1 < steps:
        return None
    for group, initial in enumerate(history.info.initial_rates):
        rate_T = history.scalar(f"lr.{group}")
        newest = float(rate_T[-1])
        has_risen = bool((np.diff(rate_T) >= 0).all()) and rate_T[-1] > rate_T[0]
        if initial is not None and has_risen and 0 < newest <= reached * initial and is_loss_left(history, left=left):
            share = Quantity(key="lr.reached", label="learning rate / rate of the optimizer", value=newest / initial)
            return Sign(
                f"the run has ended in its warm-up: the learning rate has reached {newest:.3g}, "
                f"{100 * newest / initial:.2g} % of the optimizer's {initial:.3g}",
                (share, Quantity(key="loss", value=float(history.run.newest("loss")[0]))),
                since=0,
            )
    return None
