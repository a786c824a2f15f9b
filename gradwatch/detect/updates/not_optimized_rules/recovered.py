"""Find the step from which parameters have moved that did not move before."""

# T = steps that measured the updates, L = parameter tensors

from __future__ import annotations

import numpy as np

from gradwatch.detect import Recovery
from gradwatch.detect.features.events import events_of
from gradwatch.detect.updates.not_optimized_rules.measurements import measured_updates
from gradwatch.detect.updates.not_optimized_rules.undone import CHANGE, changes_by_updates
from gradwatch.events import WEIGHTS_MOVED
from gradwatch.history.store import History
from gradwatch.records import Finding


def find_recovery(
    history: History, finding: Finding, tensors: list[int], *, samples: int, kept: float
) -> Recovery | None:
    """Return the end of a finding if all its tensors have moved.

    Args:
        history: History of the run.
        finding: The open finding.
        tensors: Its tensors.
        samples: Number of successive measurements at which tensors of an optimizer must move.
        kept: Change of a norm between two measurements, in units of an update, that shows an update that was kept.
    """
    evidence = {q.key: q.value for q in finding.evidence}
    ratio_TL, norm_TL = measured_updates(history, samples + 1)
    if len(ratio_TL) <= samples:
        return None
    if CHANGE in evidence:  # something overwrote all weights
        change_TL = changes_by_updates(history, ratio_TL, norm_TL)
        is_moving = change_TL is not None and bool((change_TL >= kept).all())
    elif evidence.get("update.ratio", 0.0) > 0:  # updates were made, and undone
        is_moving = bool((np.diff(norm_TL[:, tensors], axis=0) != 0).all())
    elif moves := _moves_by_others(history, tensors):
        return Recovery(min(moves), "its weights moved")
    else:
        is_moving = bool((ratio_TL[:, tensors] > 0).all())
    return Recovery(_first_measured(history, samples + 1), "its weights moved") if is_moving else None


def _moves_by_others(history: History, tensors: list[int]) -> list[int]:
    """Return a step at which each tensor had moved without a watched optimizer; empty if one never moved."""
    steps: dict[int, int] = {}
    for event in events_of(history, WEIGHTS_MOVED):
        steps |= dict.fromkeys(range(int(event.values["first"]), int(event.values["last"]) + 1), event.step)
    return [steps[i] for i in tensors] if steps.keys() >= set(tensors) else []


def _first_measured(history: History, count: int) -> int:
    """Return the step of the first of `count` newest measurements."""
    known_T = ~np.isnan(history.param.window("update.ratio")).all(axis=1)
    return int(history.param.steps()[known_T][-count])
