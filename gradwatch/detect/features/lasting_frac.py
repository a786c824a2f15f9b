"""Read how large a fraction of each activation module is ill in all of the newest sampled batches."""

# A = activation modules

from __future__ import annotations

import numpy as np

from gradwatch.detect.features.robust_stats import Floats
from gradwatch.history.store import History


def lasting_frac(history: History, statistic: str, *, samples: int, at_least: float) -> Floats | None:
    """Return the smallest value of a fraction over the newest samples, or None if no module can reach a bound.

    A unit that is silent or saturated in one batch only is selective. One that is so in each batch is ill.

    Args:
        history: Of the run.
        statistic: Such as `act.dead_frac`.
        samples: Number of sampled batches, all of which count.
        at_least: Fraction that some module must have in the newest batch. It makes the usual case cheap.

    Returns:
        Fractions of shape (A,), nan where a module does not measure them.
    """
    if not history.info.activations or len(history.act.steps(samples)) < samples:
        return None
    if not np.fmax.reduce(history.act.newest(statistic)) >= at_least:  # nan is not
        return None
    lasting_A: Floats = history.act.window(statistic, samples).min(axis=0)
    return lasting_A
