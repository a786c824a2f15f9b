"""Replace statistics in a synthetic history, for examples that no method of `Synthetic` covers."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from gradwatch.history.store import History


def with_statistic(
    history: History,
    statistic: str,
    values: ArrayLike,
    *,
    layers: tuple[int, ...] | None = None,
    missing: bool = False,
) -> History:
    """Return a copy of a history with a statistic replaced.

    Args:
        history: History of a `Synthetic`, without thinned steps.
        statistic: Name in the catalogue.
        values: Numbers that broadcast to (steps, layers). Steps without a measurement stay nan.
        layers: Indices of the layers to change, or None for all.
        missing: Whether to replace the values of steps without a measurement as well.
    """
    copy = History(history.info, groups=history.groups)
    copy.ending = history.ending
    for source, target in ((history.param, copy.param), (history.act, copy.act), (history.run, copy.run)):
        steps_T, values_TSL = source.rows()  # a copy, which may be written to
        if statistic in source.statistics:
            column_TL = values_TSL[:, source.statistics.index(statistic)]
            where = slice(None) if layers is None else list(layers)
            column_TL[:, where] = values if missing else np.where(np.isnan(column_TL[:, where]), np.nan, values)
        target.fill(steps_T, values_TSL)
    copy.find_validations()  # the tables were filled without `extend`
    copy.events.extend(history.events)
    return copy
