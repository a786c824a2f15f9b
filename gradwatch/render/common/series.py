"""Choose the series that shows a finding over the run: a statistic with its steps and values."""

# T = recorded steps

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from gradwatch.history.store import History
from gradwatch.records import Finding
from gradwatch.render.common import format as units
from gradwatch.render.common.layers import grad_norms, layers
from gradwatch.render.common.sparkline import Glyphs, column, sparkline

Floats = NDArray[np.floating[Any]]

USUAL = ("act.dead_frac", "grad.l2", "loss")
"""Statistics to show for a finding if its evidence names none. The first one recorded for the layer is used."""
EVERY_STEP = ("loss", "grad_norm.before_clip", "grad_norm.after_clip")
"""Statistics that every step has: nan means that the value was not finite, never that it is missing."""
# losses may be negative, and fractions are often exactly 0: neither has a logarithm
LINEAR = (
    "loss",
    "val_loss",
    "val_accuracy",
    "skipped",
    "grad.zero_frac",
    "grad.nonfinite",
    "act.dead_frac",
    "act.saturated_frac",
    "attention.entropy",
)


@final
@dataclass(frozen=True, slots=True)
class Series:
    """One statistic of one layer at the steps with a value; Inf if the value was NaN or Inf."""

    statistic: str
    steps_T: NDArray[np.int64]
    values_T: Floats

    @property
    def is_log(self) -> bool:
        """Whether the series is drawn on a log scale."""
        return self.statistic not in LINEAR

    @property
    def caption(self) -> str:
        """Name of the statistic, first and last value, and a note if the scale is logarithmic."""
        show = units.percent if self.statistic.endswith(("_frac", "_accuracy")) else units.number
        first, last = ("NaN or Inf" if np.isinf(v) else show(float(v)) for v in self.values_T[[0, -1]])
        return f"{self.statistic}, {first} to {last}" + (", log scale" if self.is_log else "")

    def draw(self, step: int, *, width: int, signs: Glyphs) -> tuple[str, int]:
        """Draw the series as a line of bars.

        Args:
            step: Onset of the finding; its value is drawn as it is, not averaged.
            width: Maximum number of columns.
            signs: Glyphs that the terminal can show.

        Returns:
            The bars, and the column of the step.
        """
        # a step without a value is drawn at the next one, or at the last
        index = min(int(np.searchsorted(self.steps_T, step)), len(self.steps_T) - 1)
        bars = sparkline(self.values_T, width=width, signs=signs, log=self.is_log, keep=index)
        return bars, column(index, len(self.steps_T), width)


def series_of(finding: Finding, history: History) -> Series | None:
    """Return the series of a finding's statistic, or None if no statistic is recorded for its layer.

    The first statistic of the evidence that is recorded for the layer is used, otherwise the first of `USUAL`.
    """
    for statistic in (*(q.key for q in finding.evidence), *USUAL):
        values_T = _values(statistic, finding.layer, history)
        if values_T is not None and not np.isnan(values_T).all():
            known_T = ~np.isnan(values_T)
            return Series(statistic, history.steps(statistic)[known_T], values_T[known_T])
    return None


def _values(statistic: str, layer: str | None, history: History) -> Floats | None:
    if statistic in history.run.statistics:
        # a statistic of the whole run says nothing about a single layer
        values_T = history[statistic] if layer is None else None
        return nan_as_inf(values_T) if values_T is not None and statistic in EVERY_STEP else values_T
    if layer is None:
        return None
    if statistic == "grad.l2":  # the layer may be a module, and a measured NaN must not count as missing
        return _grad_norm(layer, history)
    for table in (history.param, history.act):
        if statistic in table.statistics and layer in table.layers:
            return table.series(statistic)[1][:, table.layers.index(layer)]
    return None


def _grad_norm(layer: str, history: History) -> Floats | None:
    """Return the gradient norm of a parameter, or over all parameters of a module."""
    l2_TL, bad_TL = history["grad.l2"], history["grad.nonfinite"]
    if layer in history.param.layers:
        i = history.param.layers.index(layer)
        return np.where(bad_TL[:, i] > 0, np.inf, l2_TL[:, i])  # nan > 0 is false: a missing gradient stays nan
    mine = [known for known in layers(history.info.layers) if layer in known.names]
    return grad_norms(l2_TL, bad_TL, mine)[:, 0] if mine else None


def nan_as_inf(values_T: Floats) -> Floats:
    """Return a series with Inf instead of NaN, so that a NaN is drawn as broken, not as missing."""
    return np.where(np.isnan(values_T), np.inf, values_T)
