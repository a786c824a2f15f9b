"""Replace numbers in a made-up history, for examples that `Synthetic` has no illness for."""

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
        history: Made by `Synthetic`, without thinned steps.
        statistic: Name in the catalogue, of a parameter, an activation or the run.
        values: Numbers that broadcast to (steps, layers). Steps that did not measure the statistic stay nan.
        layers: Which layers to change; None for all.
        missing: Also replace steps that did not measure the statistic.
    """
    param_TSL, act_TSL, run_TSL = (table.rows()[1].copy() for table in (history.param, history.act, history.run))
    of_table = {id(history.param): param_TSL, id(history.act): act_TSL, id(history.run): run_TSL}
    table = history.table(statistic)
    column_TL = of_table[id(table)][:, table.statistics.index(statistic)]
    where = slice(None) if layers is None else list(layers)
    column_TL[:, where] = values if missing else np.where(np.isnan(column_TL[:, where]), np.nan, values)
    copy = History(history.info, groups=history.groups)
    act_at = {step: row for row, step in enumerate(history.act.kept_steps().tolist())}
    for t, step in enumerate(history.run.kept_steps().tolist()):
        run = dict(zip(history.run.statistics, run_TSL[t, :, 0].tolist(), strict=True))
        act_SL = act_TSL[act_at[step]] if step in act_at else None
        copy.append(step, run=run, param_SL=param_TSL[t], act_SL=act_SL)
    copy.events.extend(history.events)
    return copy
