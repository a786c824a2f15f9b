"""Find two batches that alternate: each batch equals the batch two steps before.

Wrong for policies that are updated for some epochs on both halves of a collection, and for data of two batches. The
second case counts only if the batch size shows that a batch is a part of the data.
"""

from __future__ import annotations

from gradwatch.detect.data_and_loss.constant_batch_rules.batch_size import batch_size, is_surely_part
from gradwatch.detect.features.finding import Sign
from gradwatch.history.store import History
from gradwatch.records import Quantity, Severity


def find_alternating_batches(history: History, *, turns: int, chosen: int) -> Sign | None:
    """Return a sign if two batches have alternated for `turns` steps, in batches of at most `chosen` samples."""
    hash_T = history.scalar("batch_hash", turns)
    # two equal batches in a row are the case of `find_repeated_batch`
    if len(hash_T) < turns or hash_T[-1] == hash_T[-2] or not (hash_T[2:] == hash_T[:-2]).all():
        return None
    if not is_surely_part(history, batch_size(history), chosen=chosen):
        return None
    label = "steps in which two batches alternated"
    return Sign(
        f"two batches alternated for {turns} steps",
        (Quantity(key="batch.alternating_steps", label=label, value=float(turns), unit="steps"),),
        since=int(history.run.steps(turns)[0]),
        severity=Severity.WARNING,
    )
