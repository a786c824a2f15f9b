"""Make runs with repeated batches, as examples for `constant_batch`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from gradwatch.events import TENSOR_HELD, WHOLE_BATCH, EventKind
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.history.synthetic.edit import with_statistic
from gradwatch.records import Event


def make_batches(
    numbers_T: ArrayLike,
    *,
    size: int = 32,
    is_held: bool = False,
    is_whole: bool = False,
    optimizer: str = "AdamW",
    event: Event | None = None,
) -> History:
    """Return a run with the given batch numbers.

    Args:
        numbers_T: Number of the batch of each step.
        size: Samples of each batch.
        is_held: Whether the first tensor is passed again.
        is_whole: Whether the batch is all the data of a DataLoader.
        optimizer: Class of the optimizer.
        event: A further event.
    """
    numbers_T = np.asarray(numbers_T)
    made = Synthetic(steps=len(numbers_T))
    made.info = replace(made.info, optimizer=optimizer)
    made.batch_hash_T = made.batch_hash_T[numbers_T]
    history = with_statistic(made.history(), "step_ms", 1.0, missing=True)
    if is_held:
        history.add_event(Event(kind=TENSOR_HELD.name, step=1))
    if is_whole:
        history.add_event(Event(kind=WHOLE_BATCH.name, step=1))
    if event:
        history.add_event(event)
    return with_statistic(history, "samples_per_s", 1e3 * size, missing=True)


def make_alike(
    kind: EventKind,
    *,
    step: int = 30,
    size: int = 32,
    exact: float = 0.0,
    equal: float = 0.0,
    is_handed_over: bool = True,
) -> History:
    """Return a run in which the probe saw the same samples again, `exact` or with noise."""
    values = {"distance": 0.1, "samples": size, "exact": exact, "equal": equal}
    made = Synthetic(steps=40).add_event(kind, step=step, text="the same samples", values=values)
    if not is_handed_over:
        made.batch_hash_T[:] = np.nan
    return made.history()
