"""Find the weight matrix that one update replaces while it hardly moves the other matrices.

Matrices that started near zero do not count, since any update replaces them. They count if their gradient leads: a
later factor then compensates for their size.
"""

# M = weight matrices and kernels

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gradwatch.detect.features.finding import Sign
from gradwatch.detect.features.robust_stats import Floats
from gradwatch.detect.features.scope import module_of
from gradwatch.detect.features.structure import NEAR_ZERO_GAIN, matrix_rms, structure_of
from gradwatch.history.store import History
from gradwatch.records import Quantity

MAX_USUAL_RATIO = 0.01
"""Update/weight ratio up to which a layer learns normally, ten times the 1e-3 that rates are chosen for."""


def find_replaced_matrix(history: History, *, decades: float, replaced: float) -> Sign | None:
    """Return a sign for the layer that an update replaces.

    Args:
        history: History of the run.
        decades: Minimum lead over the second largest update/weight ratio, in powers of ten.
        replaced: Minimum update/weight ratio.
    """
    matrices = structure_of(history).matrices
    ratio_M = history.param.newest("update.ratio")[matrices.indices_M]
    if not np.fmax.reduce(ratio_M) >= replaced:  # nan means not measured
        return None
    gain_M = history.param.newest("weight.l2")[matrices.indices_M] / matrices.signal_norm_M
    rms_M = matrix_rms(history, history.param.newest("grad.l2"))
    counts_M = (gain_M > NEAR_ZERO_GAIN) | _is_leading(rms_M, decades=decades)
    ratio_M = np.where(counts_M, ratio_M, np.nan)
    # (1, 0) fails the check below: two matrices show no outlier
    second, largest = np.sort(ratio_M[~np.isnan(ratio_M)])[-2:] if np.count_nonzero(counts_M) > 2 else (1, 0)
    if not (replaced <= largest < np.inf and second <= min(MAX_USUAL_RATIO, largest * 10**-decades)):
        return None
    layer = module_of(history, int(matrices.indices_M[np.nanargmax(ratio_M)]))
    return Sign(
        f"each update replaces {100 * largest:.3g} % of {layer} and at most {100 * second:.1g} % of other layers",
        (
            Quantity(key="update.ratio", value=float(largest)),
            Quantity(key="update.ratio.second", label="update.ratio of the second largest", value=float(second)),
        ),
        layer=layer,
    )


def _is_leading(rms_M: Floats, *, decades: float) -> NDArray[np.bool_]:
    """Return which matrix has a gradient far above all others."""
    known_M = np.sort(rms_M[~np.isnan(rms_M)])
    second = known_M[-2] if len(known_M) > 1 else np.inf
    is_leading_M: NDArray[np.bool_] = rms_M >= 10**decades * second
    return is_leading_M & (second > 0)
