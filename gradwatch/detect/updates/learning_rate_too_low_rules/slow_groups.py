"""Find layers of an optimizer group with a learning rate far below the other groups, by mistake."""

# T = steps that measured the updates, L = parameter tensors, M = weight matrices and kernels, G = optimizer groups

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from gradwatch.detect.features.baseline import first_steps
from gradwatch.detect.features.consequences import severity_after
from gradwatch.detect.features.finding import HasCode, finding_of, subject
from gradwatch.detect.features.recovery import start_of_state
from gradwatch.detect.features.scope import joined_modules
from gradwatch.detect.features.structure import structure_of
from gradwatch.detect.updates.learning_rate_too_low_rules.update_levels import is_loss_left
from gradwatch.detect.updates.learning_rate_too_low_rules.warm_up import WINDOW_STEPS
from gradwatch.history.store import History
from gradwatch.records import Finding, Quantity

REPORTED_DECAY = 1e-2
"""Learning rate of a group, over its first rate, below which the message names its decay."""


def find_slow_groups(
    detector: HasCode, history: History, *, ratio: float, samples: int, left: float, slow: float
) -> Iterator[Finding]:
    """Yield one finding for all groups that hardly move while the other groups move.

    Args:
        detector: Detector of the findings.
        history: History of the run.
        ratio: Update/weight ratio below which an update is negligible.
        samples: Negligible updates in a row that count.
        left: Part of the first loss that must remain.
        slow: Learning rate of a group, over the largest rate, up to which it is a mistake.
    """
    # a single group has no other rate to compare with
    if history.groups < 2:
        return
    is_small_M = history.param.newest("update.ratio")[structure_of(history).matrices.indices_M] < ratio
    if not is_small_M.any() or not is_loss_left(history, left=left):
        return
    ratio_TL = history.param.window("update.ratio")
    # updates are measured at some steps only
    is_known_T = ~np.isnan(ratio_TL).all(axis=1)
    steps_T, ratio_TL = history.param.steps()[is_known_T], ratio_TL[is_known_T]
    is_slow_L = _is_slow(history, slow)
    if len(ratio_TL) < samples or not is_slow_L.any():
        return
    has_gradient_L = history.param.newest("grad.l2") > 0
    still_L = is_slow_L & (ratio_TL[-samples:] < ratio).all(axis=0) & has_gradient_L
    # if nothing moves, the finding is for the run
    if not (ratio_TL[-samples:, ~is_slow_L] >= ratio).any(axis=1).all():
        return
    # the rate belongs to the whole group, in which some tensors have larger updates than others
    group_L = np.array([-1 if layer.group is None else layer.group for layer in history.info.layers])
    affected_L = np.isin(group_L, group_L[still_L]) & has_gradient_L
    severity = severity_after(history, detector.kind)
    for names, tensors in joined_modules(history, affected_L, kind=detector.kind, severity=severity):
        own_T, others_T = (np.fmax.reduce(ratio_TL[:, rows], axis=1) for rows in (tensors, ~is_slow_L))
        yield finding_of(
            detector,
            history,
            f"each update changes {subject(names).removeprefix('each of ')} by at most {100 * own_T[-1]:.1g} %: "
            + _pattern(history, np.unique(group_L[tensors]).tolist()),
            Quantity(key="update.ratio", value=float(own_T[-1])),
            Quantity(
                key="update.ratio.other_groups",
                label="largest update.ratio of the other groups",
                value=float(others_T[-1]),
            ),
            layers=names,
            severity=severity,
            onset=start_of_state(own_T < ratio, steps_T),
        )


def _pattern(history: History, slow: list[int]) -> str:
    """Return which groups have a tiny rate, compared with their first rate or with the largest rate."""
    others = [g for g in range(history.groups) if g not in slow]
    which = f"{len(slow)} of {history.groups} parameter groups"
    if len(others) == 1:
        which = f"all parameter groups but {'the last' if others[0] == history.groups - 1 else f'group {others[0]}'}"
    elif len(slow) == 1:
        which = f"parameter group {slow[0]}"
    names = [f"lr.{g}" for g in range(history.groups)]
    newest_G = np.array([history.run.newest(name)[0] for name in names])
    first_G = np.array([first_steps(history, name, 1)[0] for name in names])
    # a rate that starts at zero warms up
    fall_G = newest_G / np.where(first_G > 0, first_G, np.nan)
    fall = float(np.fmax.reduce(fall_G[slow]))
    if fall < REPORTED_DECAY:
        return f"the learning rate of {which} has fallen to {fall:.1g} of where it began"
    return f"the learning rate of {which} is {newest_G[slow].max() / newest_G.max():.1g} of the largest rate"


def _is_slow(history: History, slow: float) -> NDArray[np.bool_]:
    """Return which tensors are in a group with a tiny learning rate that does not rise, of shape (L,)."""
    rate_TG = np.stack([history.scalar(f"lr.{g}", WINDOW_STEPS) for g in range(history.groups)], axis=1)
    newest_G = rate_TG[-1]
    # `not-optimized` reports a rate of 0, and a rising rate is a warm-up
    is_slow_G = (newest_G > 0) & (newest_G <= slow * np.fmax.reduce(newest_G)) & (newest_G <= rate_TG[0])
    group_L = [-1 if layer.group is None else layer.group for layer in history.info.layers]
    is_slow_L: NDArray[np.bool_] = np.append(is_slow_G, False)[group_L]  # group -1, no optimizer, picks False
    return is_slow_L
