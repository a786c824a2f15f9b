"""Find batches that each worker of a DataLoader makes once: they have one seed, or none of them splits a stream.

The workers take turns. If all of them make the same batches, each batch comes as often in a row as there are workers. A
loop that makes as many updates with each batch passes the same tensor again, which the probe sees at the second step.
"""

# T = steps, R = runs of equal batches

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gradwatch.detect.features.events import events_of
from gradwatch.detect.features.finding import Sign
from gradwatch.events import TENSOR_HELD, WORKERS
from gradwatch.history.store import History
from gradwatch.history.table import WINDOW
from gradwatch.records import Quantity, Severity

COPIES = "batch.workers"
"""Key of the evidence that each worker makes the same batches."""


def find_worker_copies(history: History, *, batches: int) -> Iterator[Sign]:
    """Yield a sign if the newest batches each came once from each worker.

    Args:
        history: History of the run.
        batches: Minimum number of batches.
    """
    workers = int(max((event.values["workers"] for event in events_of(history, WORKERS)), default=0))
    if not workers or any(events_of(history, TENSOR_HELD)):
        return
    hash_T = history.scalar("batch_hash", min(WINDOW, workers * (batches + 2)))
    starts_R = np.flatnonzero(np.concatenate([[True], hash_T[1:] != hash_T[:-1]]))  # nan equals nothing
    lengths_R = np.diff(starts_R)[1:]  # the window may begin within the first run, and end within the last
    if len(lengths_R) >= batches and (lengths_R == workers).all():
        yield Sign(
            f"each batch comes {workers} times in a row, once from each worker of the DataLoader",
            (Quantity(key=COPIES, label="workers", value=float(workers)),),
            since=int(history.steps("loss")[0]),
            severity=Severity.WARNING,
        )
