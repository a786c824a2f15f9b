"""Find a batch that arrives many times in a row.

Each step has a 48-bit hash of its inputs. Two different batches share a hash with a chance of 2^-48, so equal hashes
mean equal batches. The required number of repeats depends on the run. If other batches came before, the newest batch
must come `again` times as often as each of them. If the loop passes the tensor of step 0 again, the batch may be a
collection that reinforcement learning uses for many updates.

Wrong for full-batch training, which is reported as info if the batch size or a DataLoader of one batch shows it.
"""

# T = steps of a window, R = runs of equal batches

from __future__ import annotations

import numpy as np

from gradwatch.detect.data_and_loss.constant_batch_rules.batch_size import (
    are_points,
    batch_size,
    is_surely_part,
    may_be_part,
)
from gradwatch.detect.features.events import events_of
from gradwatch.detect.features.finding import Sign
from gradwatch.events import TENSOR_HELD, WHOLE_BATCH
from gradwatch.history.store import History
from gradwatch.records import Quantity, Severity


def find_repeated_batch(
    history: History,
    *,
    repeats: int,
    held: int,
    longest: int,
    again: int,
    chosen: int,
    small: int,
    toy: int,
    coordinates: int,
) -> Sign | None:
    """Return a sign if the newest batch repeats more often than other batches or a policy explain.

    Args:
        history: History of the run.
        repeats: Times in a row that count.
        held: Times that count if the very same tensor arrives again.
        longest: Times that count if that tensor has more than `chosen` samples.
        again: Times that count, in units of the largest number of times that an earlier batch came in a row.
        chosen: Samples up to which a batch of each round size counts as chosen.
        small: Samples up to which each size may be chosen.
        toy: Samples up to which a tensor that is kept may be all the data.
        coordinates: Numbers of a sample up to which it may be a point at which an equation must hold.
    """
    hash_T, size, least = history.scalar("batch_hash"), batch_size(history), repeats
    is_held = any(events_of(history, TENSOR_HELD))
    changes = np.flatnonzero(hash_T[1:] != hash_T[:-1]) + 1
    *before_R, times = np.diff([0, *changes, len(hash_T)]).tolist()  # the window may cut the first run short
    if before_R:
        # earlier runs of equal batches show how many updates the loop makes per batch on purpose
        least = max(least, again * max(before_R))
    elif is_held:
        least = max(least, longest if size > chosen else held)
    if times < least:
        return None
    # earlier batches prove that there are more data; a tensor that is kept may well be all of them
    if are_points(history, most=coordinates):
        is_part = False
    elif before_R:
        is_part = True
    elif is_held:
        is_part = is_surely_part(history, size, chosen=chosen, toy=toy)
    elif any(events_of(history, WHOLE_BATCH)):
        is_part = False
    else:
        is_part = may_be_part(history, size, chosen=chosen, small=small)
    label = "minimum number of equal batches in a row"
    return Sign(
        f"the last {least} steps all used the same batch",
        (Quantity(key="batch.equal_run", label=label, value=float(least), unit="steps"),),
        since=int(history.run.steps(times)[0]),
        severity=Severity.WARNING if is_part else Severity.INFO,
    )
