"""Make runs with repeated batches, as examples for `constant_batch`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from gradwatch.events import DERIVATIVE, WORKERS, EventKind
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Event


def make_batches(
    numbers_T: ArrayLike,
    *kinds: EventKind,
    optimizer: str = "AdamW",
    width: float | None = None,
    workers: int = 0,
) -> History:
    """Return a run with the given batch numbers.

    Args:
        numbers_T: Number of the batch of each step.
        kinds: Kinds of events of step 1.
        optimizer: Class of the optimizer.
        width: Numbers of a sample by which the loss is differentiated, or None if it is not.
        workers: Workers of the DataLoader, if it has several.
    """
    numbers_T = np.asarray(numbers_T)
    made = Synthetic(steps=len(numbers_T))
    made.info = replace(made.info, optimizer=optimizer)
    made.batch_hash_T = made.batch_hash_T[numbers_T]
    history = made.history()
    for kind in kinds:
        history.add_event(Event(kind=kind.name, step=1))
    if workers:
        history.add_event(Event(kind=WORKERS.name, step=1, values={"workers": workers}))
    if width is not None:
        history.add_event(Event(kind=DERIVATIVE.name, step=0, values={"tensors": 1.0, "width": width}))
    return history


def make_alike(
    kind: EventKind, *, step: int = 30, equal: float = 0.0, part: float = 0.0, is_handed_over: bool = True
) -> History:
    """Return a run in which the probe saw the same samples again."""
    values = {"distance": 0.1, "samples": 32, "equal": equal, "part": part}
    made = Synthetic(steps=40).add_event(kind, step=step, text="the same samples", values=values)
    if not is_handed_over:
        made.batch_hash_T[:] = np.nan
    return made.history()
