"""Read which fraction of each activation module is faulty in all of the newest sampled batches."""

# A = activation modules

from __future__ import annotations

import numpy as np

from gradwatch.detect.features.robust_stats import Floats
from gradwatch.history.store import History


def lasting_frac(history: History, statistic: str, *, samples: int, at_least: float) -> Floats | None:
    """Return the smallest value of a fraction over the newest samples, or None if no module can reach a bound.

    A unit that is silent or saturated in a single batch is selective. A unit that is so in every batch is faulty.

    Args:
        history: History of the run.
        statistic: Name of the fraction, such as `act.dead_frac`.
        samples: Number of sampled batches that must agree.
        at_least: Fraction that a module must reach in the newest batch. This check makes the usual case cheap.

    Returns:
        Fractions of shape (A,), nan where a module does not measure them.
    """
    if not history.info.activations or len(history.act.steps(samples)) < samples:
        return None
    if not np.fmax.reduce(history.act.newest(statistic)) >= at_least:  # False for nan
        return None
    # `min` keeps nan: a module that missed a sample cannot be faulty in all of them
    lasting_A: Floats = history.act.window(statistic, samples).min(axis=0)
    return lasting_A
