"""Print and count what the checks compare."""

from __future__ import annotations

from typing import Any, final

import numpy as np


@final
class Report:
    """Prints one line for each comparison.

    Attributes:
        failures: Comparisons that failed.
    """

    def __init__(self) -> None:
        self.failures = 0

    def expect(self, is_right: bool, text: str) -> None:
        """Print whether something is as it should be."""
        self.failures += not is_right
        print(f"{'ok   ' if is_right else 'WRONG'} {text}", flush=True)


REPORT = Report()
expect = REPORT.expect


def largest_error(a: Any, b: Any) -> float:
    """Return the largest relative error of numbers; inf if only one of two is nan or infinite."""
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if not np.array_equal(np.isnan(x), np.isnan(y)) or not np.array_equal(x[np.isinf(x)], y[np.isinf(y)]):
        return float("inf")
    are_finite = np.isfinite(y)
    scale = np.maximum(np.abs(y[are_finite]), 1e-30)
    return float(np.max(np.abs(x[are_finite] - y[are_finite]) / scale, initial=0.0))
