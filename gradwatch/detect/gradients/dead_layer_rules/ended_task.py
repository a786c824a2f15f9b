"""Recognize a head that waits while another task is trained: its gradient ends when other parameters join the model.

With continual learning, each task brings a head of its own. A penalty on all weights keeps the gradient of an earlier
head at zero instead of None.
"""

# T = steps of a window

from __future__ import annotations

import numpy as np

from gradwatch.detect.features.events import events_of
from gradwatch.events import PARAMETERS_JOINED
from gradwatch.history.store import History


def is_ended_task(history: History, group: list[int]) -> bool:
    """Return whether the gradient of some tensors ended as other parameters joined the model and an optimizer.

    Args:
        history: History of the run.
        group: Indices of the tensors, which have no gradient now.
    """
    is_live_T = (history.param.window("grad.l2")[:, group] > 0).any(axis=1)
    if not is_live_T.any():
        return False
    last = int(history.param.steps()[np.flatnonzero(is_live_T)[-1]])  # newest step with a gradient
    return any(event.values["since"] <= last < event.step for event in events_of(history, PARAMETERS_JOINED))
