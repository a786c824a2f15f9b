"""Find a batch that arrives many times in a row.

Each step has a 48-bit hash of its inputs. Two different batches share a hash with a chance of 2^-48, so equal hashes
mean equal batches. The required number of repeats depends on the run. If other batches came before, the newest batch
must come `again` times as often as each of them. If the loop passes the tensor of step 0 again, the batch may be a
collection that reinforcement learning uses for many updates.

A batch that may be all the data is reported as info: full-batch training is not a mistake.
"""

# T = steps of a window, R = runs of equal batches

from __future__ import annotations

import numpy as np

from gradwatch.detect.data_and_loss.constant_batch_rules.batch_origin import ALL_DATA, is_part, needs_one_batch
from gradwatch.detect.features.events import events_of
from gradwatch.detect.features.finding import Sign
from gradwatch.events import TENSOR_HELD
from gradwatch.history.store import History
from gradwatch.records import Quantity, Severity


def find_repeated_batch(
    history: History, *, repeats: int, held: int, longest: int, again: int, coordinates: int
) -> Sign | None:
    """Return a sign if the newest batch repeats more often than other batches or a policy explain.

    Args:
        history: History of the run.
        repeats: Times in a row that count.
        held: Times that count if the very same tensor arrives again, and there are more data.
        longest: Times that count if that tensor may be all the data, or a collection of them.
        again: Times that count, in units of the largest number of times that an earlier batch came in a row.
        coordinates: Numbers of a sample up to which it may be a point at which an equation must hold.
    """
    hash_T, least = history.scalar("batch_hash"), repeats
    has_more = is_part(history)
    changes = np.flatnonzero(hash_T[1:] != hash_T[:-1]) + 1
    *before_R, times = np.diff([0, *changes, len(hash_T)]).tolist()  # the window may cut the first run short
    if before_R:
        # earlier batches show how many updates the loop makes with each on purpose, and that there are more data
        least, has_more = max(least, again * max(before_R)), True
    elif any(events_of(history, TENSOR_HELD)):
        least = max(least, held if has_more else longest)
    if times < least:
        return None
    label = "minimum number of equal batches in a row"
    is_mistake = has_more and not needs_one_batch(history, coordinates=coordinates)
    return Sign(
        f"the last {least} steps all used the same batch" + ("" if has_more else ALL_DATA),
        (Quantity(key="batch.equal_run", label=label, value=float(least), unit="steps"),),
        since=int(history.run.steps(times)[0]),
        severity=Severity.WARNING if is_mistake else Severity.INFO,
    )
