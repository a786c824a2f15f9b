"""Find layers of an optimizer group with a learning rate far below the other groups, by mistake."""

# T = steps that measured the updates, L = parameter tensors, M = weight matrices and kernels, G = optimizer groups

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from gradwatch.detect.features.consequences import severity_after
from gradwatch.detect.features.finding import HasCode, finding_of
from gradwatch.detect.features.scope import affected_modules
from gradwatch.detect.features.structure import structure_of
from gradwatch.detect.updates.learning_rate_too_low_rules.update_levels import is_loss_left
from gradwatch.detect.updates.learning_rate_too_low_rules.warm_up import WINDOW_STEPS
from gradwatch.history.store import History
from gradwatch.records import Finding, Quantity

MAX_RATE_FRAC = 1e-4
"""Learning rate of a group, over the largest rate, that is a mistake: fine-tuning uses 1/100, or 1/200 in steps."""


def find_slow_groups(
    detector: HasCode, history: History, *, ratio: float, samples: int, left: float
) -> Iterator[Finding]:
    """Yield the modules of each group that moves by less than `ratio` a step while the other groups move."""
    # a single group has no other rate to compare with
    if history.groups < 2:
        return
    is_small_M = history.param.newest("update.ratio")[structure_of(history).matrices.indices_M] < ratio
    if not is_small_M.any() or not is_loss_left(history, left=left):
        return
    ratio_TL = history.param.window("update.ratio")
    # updates are measured at some steps only
    ratio_TL = ratio_TL[~np.isnan(ratio_TL).all(axis=1)][-samples:]
    is_slow_L = _is_slow(history)
    if len(ratio_TL) < samples or not is_slow_L.any():
        return
    still_L = is_slow_L & (ratio_TL < ratio).all(axis=0) & (history.param.newest("grad.l2") > 0)
    # if nothing moves, the finding is for the run
    if not (ratio_TL[:, ~is_slow_L] >= ratio).any(axis=1).all():
        return
    for layer, group in affected_modules(history, still_L, kind=detector.kind):
        own, others = (float(np.fmax.reduce(ratio_TL[-1, rows])) for rows in (group, ~is_slow_L))
        yield finding_of(
            detector,
            history,
            f"each update changes {layer or 'the whole model'} by {100 * own:.1g} %: its parameter group has "
            "next to nothing of the others' rate",
            Quantity(key="update.ratio", value=own),
            Quantity(key="update.ratio.other_groups", label="largest update.ratio of the other groups", value=others),
            layer=layer,
            severity=severity_after(history, detector.kind),
        )


def _is_slow(history: History) -> NDArray[np.bool_]:
    """Return which tensors are in a group with a tiny learning rate that does not rise, of shape (L,)."""
    rate_TG = np.stack([history.scalar(f"lr.{g}", WINDOW_STEPS) for g in range(history.groups)], axis=1)
    newest_G = rate_TG[-1]
    # `not-optimized` reports a rate of 0, and a rising rate is a warm-up
    is_slow_G = (newest_G > 0) & (newest_G <= MAX_RATE_FRAC * np.fmax.reduce(newest_G)) & (newest_G <= rate_TG[0])
    group_L = [-1 if layer.group is None else layer.group for layer in history.info.layers]
    is_slow_L: NDArray[np.bool_] = np.append(is_slow_G, False)[group_L]  # group -1, no optimizer, picks False
    return is_slow_L
