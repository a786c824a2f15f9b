"""Read a statistic of every layer in the order of the model, at the onset of a finding and at the end of the run."""

# T = recorded steps, M = layers in the order of the model

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from gradwatch.history.store import History
from gradwatch.records import Finding
from gradwatch.render.common.layers import matrices, norms_over_run, update_ratios_over_run

Floats = NDArray[np.floating[Any]]
Steps = NDArray[np.int64]

STATISTICS = {
    "vanishing-gradient": "grad.l2",
    "exploding-gradient": "grad.l2",
    "layer-imbalance": "grad.l2",
    "no-gradient": "grad.l2",
    "dead-layer": "grad.l2",
    "dead-relu": "act.dead_frac",
    "saturated-activation": "act.saturated_frac",
    "attention-collapse": "attention.max_logit",
}
"""Statistic to show over depth, by kind of finding. All other kinds are about a change over the steps."""
RATIO = "update.ratio"
MIN_LAYERS = 3
"""Minimum number of layers with a value: fewer have no shape over depth."""
MIN_BEFORE = 4
"""Minimum number of recorded steps before the onset for a range of healthy values."""
RANGE = (0.05, 0.95)
"""Quantiles over the steps before the onset: a single early spike does not widen the range."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DepthProfile:
    """One statistic of every layer: nan without a value, Inf if the value was NaN or Inf.

    Args:
        statistic: Name in the catalogue.
        layers: Names of the layers, input side first.
        affected: Indexes of the layers of the finding.
        onset: Recorded step nearest to the onset.
        onset_M: Values at the onset.
        end: Newest step with values.
        end_M: Values at that step.
        before: Number of recorded steps before the onset.
        usual_M: Lower and upper end of the range of each layer before the onset, or None after too few steps.
    """

    statistic: str
    layers: tuple[str, ...]
    affected: tuple[int, ...]
    onset: int
    onset_M: Floats
    end: int
    end_M: Floats
    before: int
    usual_M: tuple[Floats, Floats] | None

    @property
    def median(self) -> float:
        """Median of the layers at the onset, over the values above 0; nan without one."""
        usable_M = self.onset_M[np.isfinite(self.onset_M) & (self.onset_M > 0)]
        return float(np.median(usable_M)) if usable_M.size else float("nan")


def depth_profile(findings: Sequence[Finding], history: History) -> DepthProfile | None:
    """Return the profile over depth that shows findings, or None for a kind without one or a model of few layers.

    Args:
        findings: Findings of one kind; the first one gives the onset.
        history: The run.
    """
    finding = findings[0]
    if finding.kind not in STATISTICS or not finding.names:
        return None
    statistic = STATISTICS[finding.kind]
    if any(quantity.key.startswith(RATIO) for quantity in finding.evidence):
        statistic = RATIO
    layers, affected, steps_T, values_TM = _values(statistic, {name for f in findings for name in f.names}, history)
    known_T = ~np.isnan(values_TM).all(axis=1)
    if not known_T.any() or np.count_nonzero(~np.isnan(values_TM).all(axis=0)) < MIN_LAYERS:
        return None
    steps_T, values_TM = steps_T[known_T], values_TM[known_T]
    at = min(int(np.searchsorted(steps_T, finding.since)), len(steps_T) - 1)
    return DepthProfile(
        statistic=statistic,
        layers=layers,
        affected=affected,
        onset=int(steps_T[at]),
        onset_M=values_TM[at],
        end=int(steps_T[-1]),
        end_M=values_TM[-1],
        before=at,
        usual_M=_usual(values_TM[:at]),
    )


def _values(
    statistic: str, names: set[str], history: History
) -> tuple[tuple[str, ...], tuple[int, ...], Steps, Floats]:
    """Return the names of all layers, the indexes of the layers in `names`, the steps and the values."""
    if statistic in history.act.statistics:
        affected = tuple(i for i, name in enumerate(history.act.layers) if name in names)
        return history.act.layers, affected, *history.act.series(statistic)
    of = matrices(history.info.layers)
    series = update_ratios_over_run if statistic == RATIO else norms_over_run
    affected = tuple(i for i, layer in enumerate(of) if not names.isdisjoint(layer.names))
    return tuple(layer.name for layer in of), affected, *series(history, of)


def _usual(before_TM: Floats) -> tuple[Floats, Floats] | None:
    if len(before_TM) < MIN_BEFORE:
        return None
    sorted_TM = np.sort(np.where(np.isinf(before_TM), np.nan, before_TM), axis=0)  # nan last
    last_M = np.count_nonzero(~np.isnan(sorted_TM), axis=0) - 1
    columns = np.arange(sorted_TM.shape[1])
    # a layer without a value takes its first row, which is nan
    low_M, high_M = (sorted_TM[np.maximum(np.rint(q * last_M), 0).astype(np.intp), columns] for q in RANGE)
    return low_M, high_M
