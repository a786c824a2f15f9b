"""Find gradient norms with a square, as in Adam's second moment, above the range of float32."""

from __future__ import annotations

import numpy as np

from gradwatch.detect.features.finding import Sign
from gradwatch.detect.features.scope import module_of
from gradwatch.history.store import History
from gradwatch.records import Quantity, Severity

OVERFLOW_NORM = 1e18
"""Norm at which its square leaves float32 (largest 3.4e38, with a root of 1.8e19)."""

MIN_SHARE = 0.7
"""Share of the total norm at which one tensor holds half of the squared norm and so causes the overflow."""


def find_overflow(history: History, norm: float) -> Sign | None:
    """Return a sign if the square of the newest total norm overflows in float32."""
    if not OVERFLOW_NORM <= norm < np.inf:  # `non-finite` reports Inf
        return None
    l2_L = history.param.newest("grad.l2")
    widest = int(np.nanargmax(l2_L))  # there is one, since the total is a number
    layer = module_of(history, widest) if l2_L[widest] >= MIN_SHARE * norm else None
    whose = f" of {layer}" if layer else ""
    return Sign(
        f"the gradient norm{whose} is so large that its square overflows float32",
        (Quantity(key="grad_norm.before_clip", value=norm),),
        layer=layer,
        severity=Severity.CRITICAL,
    )
