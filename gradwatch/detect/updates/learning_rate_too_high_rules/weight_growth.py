"""Find weights that grow by a large factor within a few steps."""

# T = steps of a window, W = weight matrices and kernels, or embeddings if there are no others

from __future__ import annotations

import numpy as np

from gradwatch.detect.features.finding import Sign, format_factor
from gradwatch.detect.features.robust_stats import log10, median
from gradwatch.detect.features.structure import NEAR_ZERO_GAIN, structure_of
from gradwatch.history.store import History
from gradwatch.records import Quantity

WINDOW_STEPS = 20
"""Steps over which growth is measured: two samples of the weights at the default schedule."""

DEFAULT_GAIN = 0.577
"""Row norm of PyTorch's default initialization of linear layers and convolutions: uniform within 1 / sqrt(fan-in)."""


def find_weight_growth(history: History, *, growth: float, every: int) -> Sign | None:
    """Return the sign of weights that grew by at least `growth` powers of ten within the last 20 steps."""
    structure = structure_of(history)
    weights_W = structure.rate_weights.indices_W
    if history.step < every or not history.param.newest("weight.l2")[weights_W[0]] >= 0:  # nan: not measured
        return None
    norm_TL = history.param.window("weight.l2", WINDOW_STEPS + 1)
    # norms are measured at some steps only: take the first row that has any
    at = 0 if norm_TL[0, weights_W[0]] >= 0 else int(np.argmax(~np.isnan(norm_TL).all(axis=1)))
    first_W, last_W = norm_TL[at, weights_W], norm_TL[-1, weights_W]
    # cheap: most weights must have grown by that much
    if 2 * np.count_nonzero(last_W > 10**growth * first_W) < len(first_W):
        return None
    gain_W = first_W / structure.rate_weights.unit_norm_W  # near 1 for weights that keep the size of the signal
    # growth up to the default size does no harm: small weights may have started below it
    usual_W = np.maximum(first_W, DEFAULT_GAIN * structure.rate_weights.unit_norm_W)
    # embeddings start near zero if the model has no matrices, so they count as they are
    counts_W = (gain_W > NEAR_ZERO_GAIN) | (len(structure.matrices.indices_M) == 0)
    found = float(median(np.where(counts_W, log10(last_W) - log10(usual_W), np.nan)))
    if not growth <= found < np.inf:
        return None
    rate = float(history.run.newest("lr.0")[0])
    ratio = float(median(history.param.newest("update.ratio")[weights_W]))
    return Sign(
        f"the weights grew {format_factor(10**found)}-fold within {WINDOW_STEPS} steps at a learning rate of {rate:g}",
        (
            Quantity(
                key="weight.l2.growth_decades",
                label="median growth of weight.l2",
                value=found,
                unit="orders of magnitude",
            ),
            Quantity(key="update.ratio.median", label="median update.ratio", value=ratio),
            Quantity(key="lr.0", value=rate),
        ),
        since=history.step - 1,  # the newest gradient has not moved these weights yet
    )
