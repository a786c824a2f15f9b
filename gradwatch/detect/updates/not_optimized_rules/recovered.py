"""Find the step from which parameters have moved that did not move before, or an optimizer has stepped again."""

# T = steps that measured the updates, L = parameter tensors

from __future__ import annotations

import numpy as np

from gradwatch.detect import Recovery
from gradwatch.detect.features.events import events_of
from gradwatch.detect.updates.not_optimized_rules.measurements import measured_updates
from gradwatch.events import WEIGHTS_MOVED
from gradwatch.history.store import History


def find_recovery(history: History, tensors: list[int], *, samples: int) -> Recovery | None:
    """Return the end of a finding if all its tensors have moved.

    Args:
        history: History of the run.
        tensors: The tensors of the finding.
        samples: Number of successive measurements at which tensors of an optimizer must move.
    """
    ratio_TL, _ = measured_updates(history, samples + 1)
    if len(ratio_TL) <= samples:
        return None
    if moves := _moves_by_others(history, tensors):
        return Recovery(min(moves), "its weights moved")
    is_moving = bool((ratio_TL[:, tensors] > 0).all())
    return Recovery(_first_measured(history, samples + 1), "its weights moved") if is_moving else None


def find_resumed_updates(history: History) -> Recovery | None:
    """Return the first of the newest steps with updates, if the newest step has one."""
    is_skipped_T = history.scalar("skipped") == 1
    resumed = int(np.argmax(is_skipped_T[::-1]))
    return Recovery(int(history.run.steps()[-resumed]), "an optimizer stepped again") if resumed else None


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
