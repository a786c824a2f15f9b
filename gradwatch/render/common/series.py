"""Choose the series that shows a finding over the run: its statistic, steps and values."""

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
"""Statistics to show for a finding whose evidence names none: the first that is recorded for its layer."""
EVERY_STEP = ("loss", "grad_norm.before_clip", "grad_norm.after_clip")
"""Statistics that every step has: where one is nan, it was not finite."""
LINEAR = (
    "loss",
    "val_loss",
    "val_accuracy",
    "skipped",
    "grad.zero_frac",
    "grad.nonfinite",
    "act.dead_frac",
    "act.saturated_frac",
)


@final
@dataclass(frozen=True, slots=True)
class Series:
    """One statistic of one layer over the steps at which it is known; Inf where it was NaN or Inf."""

    statistic: str
    steps_T: NDArray[np.int64]
    values_T: Floats

    @property
    def is_log(self) -> bool:
        """Whether it is drawn in powers of ten."""
        return self.statistic not in LINEAR

    @property
    def caption(self) -> str:
        """Its name, its first and last value, and whether it is drawn in powers of ten."""
        show = units.percent if self.statistic.endswith(("_frac", "_accuracy")) else units.number
        first, last = ("NaN or Inf" if np.isinf(v) else show(float(v)) for v in self.values_T[[0, -1]])
        return f"{self.statistic}, {first} to {last}" + (", log scale" if self.is_log else "")

    def draw(self, step: int, *, width: int, signs: Glyphs) -> tuple[str, int]:
        """Return it as a line of bars of at most `width` columns, and the column of a step, whose value is kept."""
        index = min(int(np.searchsorted(self.steps_T, step)), len(self.steps_T) - 1)
        bars = sparkline(self.values_T, width=width, signs=signs, log=self.is_log, keep=index)
        return bars, column(index, len(self.steps_T), width)


def series_of(finding: Finding, history: History) -> Series | None:
    """Return the first statistic of a finding's evidence that is recorded for its layer, or a usual one, or None."""
    for statistic in (*(q.key for q in finding.evidence), *USUAL):
        values_T = _values(statistic, finding.layer, history)
        if values_T is not None and not np.isnan(values_T).all():
            known_T = ~np.isnan(values_T)
            return Series(statistic, history.steps(statistic)[known_T], values_T[known_T])
    return None


def _values(statistic: str, layer: str | None, history: History) -> Floats | None:
    if statistic in history.run.statistics:
        values_T = history[statistic] if layer is None else None
        return broken(values_T) if values_T is not None and statistic in EVERY_STEP else values_T
    if layer is None:
        return None
    if statistic == "grad.l2":
        return _grad_norm(layer, history)
    for table in (history.param, history.act):
        if statistic in table.statistics and layer in table.layers:
            return table.series(statistic)[1][:, table.layers.index(layer)]
    return None


def _grad_norm(layer: str, history: History) -> Floats | None:
    """Return the gradient norm of a parameter, or of all parameters of a module."""
    l2_TL, bad_TL = history["grad.l2"], history["grad.nonfinite"]
    if layer in history.param.layers:
        i = history.param.layers.index(layer)
        return np.where(bad_TL[:, i] > 0, np.inf, l2_TL[:, i])
    mine = [known for known in layers(history.info.layers) if layer in known.names]
    return grad_norms(l2_TL, bad_TL, mine)[:, 0] if mine else None


def broken(values_T: Floats) -> Floats:
    """Return a series that every step has, with Inf for NaN, so that it is drawn as broken."""
    return np.where(np.isnan(values_T), np.inf, values_T)
