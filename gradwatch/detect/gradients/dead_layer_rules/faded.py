"""Find layers that gradually fall out of use: their gradient comes more and more rarely, and then not at all.

A rate of skipping that rises until it is 1, as of stochastic depth or of a modality, or a choice among branches that
settles on others, ends the learning of a layer though nothing in it died. The gradient of a skipped layer is None or
zero. A task that is over ends from one step to the next, and counts as the choice of the loop.

The steps with a gradient, up to the last of them, are counted in three parts of equal length. The counts must fall from
part to part, by more than chance, and the newest absence must be longer than chance allows at the last of these rates.
"""

# T = kept steps, L = parameter tensors

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from gradwatch.detect.features.finding import Sign
from gradwatch.detect.features.scope import affected_modules
from gradwatch.detect.features.sequential_test import (
    SequentialTest,
    allowed_error,
    critical_sigmas,
    looks_in_window,
    window_number,
)
from gradwatch.detect.features.structure import structure_of
from gradwatch.detect.gradients.dead_layer_rules.experts import is_side_by_side
from gradwatch.history.store import History
from gradwatch.records import Quantity


def find_faded(
    history: History, *, kind: str, every: int, gone: int, steps: int, first_share: float, last_ratio: float
) -> Iterator[Sign]:
    """Yield a sign for each module that gradually fell out of use.

    Args:
        history: History of the run.
        kind: Kind of the resulting finding.
        every: Steps between two calls.
        gone: Minimum number of newest steps without a gradient.
        steps: Minimum number of kept steps up to the last gradient.
        first_share: Minimum share of the steps of the first third with a gradient.
        last_ratio: Maximum share of the last third, over the share of the first.
    """
    structure = structure_of(history)
    away_L = structure.is_trainable_L & ~(history.param.newest("grad.l2") > 0)
    # cheap: all layers are in use, or none is
    if not away_L.any() or 2 * np.count_nonzero(away_L) > structure.num_trainable:
        return
    recent_TL = history.param.window("grad.l2", gone) > 0
    away_L &= ~recent_TL.any(axis=0) & ~is_side_by_side(history)
    if len(recent_TL) < gone or not away_L.any():
        return
    columns = np.flatnonzero(away_L)
    steps_T, l2_TL = history.param.series("grad.l2")
    used_TL = l2_TL[:, columns] > 0
    among = structure.num_trainable * looks_in_window(every)
    error = allowed_error(SequentialTest.FADING_USE, window_number(history), among=among)
    shares = {
        int(i): _last_share(used_T, error=error, steps=steps, first_share=first_share, last_ratio=last_ratio)
        for i, used_T in zip(columns, used_TL.T, strict=True)
    }
    faded = {i: share for i, share in shares.items() if share}
    affected_L = np.isin(np.arange(len(away_L)), list(faded))
    for layer, group in affected_modules(history, affected_L, kind=kind):
        if layer is None:
            continue
        last = int(steps_T[np.flatnonzero(used_TL[:, np.isin(columns, group)].any(axis=1))[-1]])
        first, newest = faded[group[0]]
        yield Sign(
            f"{layer} gradually fell out of use: it got a gradient at {100 * first:.0f} % of the steps at "
            f"first, at {100 * newest:.0f} % later, and at none since step {last}",
            (
                Quantity(key="use.first_share", label="steps with a gradient, first third", value=first, unit="0..1"),
                Quantity(key="use.last_share", label="steps with a gradient, last third", value=newest, unit="0..1"),
                Quantity(key="use.last_step", label="last step with a gradient", value=float(last)),
            ),
            since=last + 1,
            layer=layer,
        )


def _last_share(
    used_T: NDArray[np.bool_], *, error: float, steps: int, first_share: float, last_ratio: float
) -> tuple[float, float] | None:
    """Return the shares of the first and the last third of the used steps, or None if the use did not fade away.

    Args:
        used_T: Whether the tensor had a gradient at each kept step.
        error: Probability at which chance no longer explains a fall of the share, or an absence.
        steps: Minimum number of kept steps up to the last gradient.
        first_share: Minimum share of the first third.
        last_ratio: Maximum share of the last third, over the share of the first.
    """
    last = int(np.flatnonzero(used_T)[-1]) + 1 if used_T.any() else 0
    if last < max(steps, 3):  # each third has a step
        return None
    third = last // 3
    first, middle, newest = (float(used_T[i * third : (i + 1) * third].mean()) for i in range(3))
    sigma = np.sqrt((first * (1 - first) + newest * (1 - newest)) / third)
    is_falling = first >= first_share and first > middle > newest and newest <= last_ratio * first
    is_gone = (1 - newest) ** (len(used_T) - last) <= error
    return (first, newest) if is_falling and is_gone and first - newest > critical_sigmas(error) * sigma else None
