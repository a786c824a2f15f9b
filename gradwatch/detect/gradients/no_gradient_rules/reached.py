"""Tell which tensors have had a gradient, and when a finding about a missing gradient is over."""

# T = steps of a window, L = parameter tensors

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gradwatch.detect import Recovery
from gradwatch.detect.features.recovery import tensors_of
from gradwatch.history.store import WINDOW, History
from gradwatch.records import Finding


def reached_steps(history: History, penalized_L: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which tensors had a gradient other than zero at each step of the window, of shape (T, L).

    Args:
        history: History of the run.
        penalized_L: Tensors whose gradient does not count, as from `are_penalized`.
    """
    l2_TL = history.param.window("grad.l2")
    # a norm that is nan because of NaN elements is a gradient that arrives
    is_missing_TL = (l2_TL == 0) | (np.isnan(l2_TL) & ~(history.param.window("grad.nonfinite") > 0))
    return np.asarray(~is_missing_TL & ~penalized_L)


def judged_tensors(history: History, *, kind: str) -> NDArray[np.bool_]:
    """Return for which tensors the history shows whether a gradient ever came, of shape (L,).

    After one window this is known only of the rest of a finding that is withdrawn at this step.
    """
    is_judged_L = np.full(len(history.info.layers), history.param.last_step < WINDOW)
    for finding in history.withdrawn:
        if finding.kind == kind and finding.withdrawn == history.step:
            is_judged_L[tensors_of(history, finding)] = True
    return is_judged_L


def awaits_optimizer(history: History, *, least: int) -> NDArray[np.bool_]:
    """Return which tensors an optimizer holds that has stepped too rarely to tell, of shape (L,).

    The rate of a group is recorded at the steps of its optimizer only.

    Args:
        history: History of the run.
        least: Minimum number of steps of the optimizer.
    """
    groups = {layer.group for layer in history.info.layers} - {None}
    steps = {group: int(np.isfinite(history.scalar(f"lr.{group}")).sum()) for group in groups}
    if not any(steps.values()):  # the loop records no rates
        return np.zeros(len(history.info.layers), np.bool_)
    return np.array([steps.get(layer.group, least) < least for layer in history.info.layers], np.bool_)


def find_first_gradient(
    history: History, finding: Finding, penalized_L: NDArray[np.bool_], *, least: int
) -> Recovery | None:
    """Return the first step with a gradient after a finding, once one of its tensors has had enough of them.

    Args:
        history: History of the run.
        finding: Finding about missing gradients.
        penalized_L: As for `reached_steps`.
        least: Minimum number of steps with a gradient in a tensor.
    """
    tensors, is_later_T = tensors_of(history, finding), history.param.steps() > finding.step
    reached_TL = reached_steps(history, penalized_L)[is_later_T][:, tensors]
    is_back_L = np.count_nonzero(reached_TL, axis=0) >= least
    if not is_back_L.any():
        return None
    first = int(np.argmax(reached_TL[:, is_back_L].any(axis=1)))
    who = "it" if is_back_L.all() else f"{is_back_L.sum()} of {len(tensors)} tensors"
    return Recovery(int(history.param.steps()[is_later_T][first]), f"{who} got a gradient")
