"""Find a batch that arrives many times in a row.

Each step has a 48-bit hash of its inputs. Two different batches share one with a chance of 2^-48, so equal hashes are
the same batch. How often it must come depends on the run. If other batches came before, it must come twice as often as
each of them. If the loop hands over the tensor of step 0 again, it may be a collection that reinforcement learning
goes over many times.

Wrong for full-batch training, which is reported as info if the size of the batch shows it.
"""

# T = steps of a window, R = runs of equal batches

from __future__ import annotations

import numpy as np

from gradwatch.detect.data_and_loss.constant_batch_rules.batch_size import batch_size, may_be_part
from gradwatch.detect.features.events import events_of
from gradwatch.detect.features.finding import Sign
from gradwatch.events import TENSOR_HELD
from gradwatch.history.store import History
from gradwatch.records import Quantity, Severity


def find_repeated_batch(history: History, *, repeats: int, held: int, longest: int, chosen: int) -> Sign | None:
    """Return a sign if the newest batch has come more often in a row than other batches, or a policy, explain.

    Args:
        history: Of the run.
        repeats: Times in a row that count.
        held: Times that count if it is the very same tensor.
        longest: Times that count if it is the very same tensor, of more than `chosen` samples.
        chosen: Samples up to which a batch of each round size counts as chosen.
    """
    hash_T, size, least = history.scalar("batch_hash"), batch_size(history), repeats
    changes = np.flatnonzero(hash_T[1:] != hash_T[:-1]) + 1
    *before_R, times = np.diff([0, *changes, len(hash_T)]).tolist()  # the first run as far as the window shows it
    if before_R:
        least = max(least, 2 * max(before_R))
    elif any(events_of(history, TENSOR_HELD)):
        least = max(least, longest if size > chosen else held)
    if times < least:
        return None
    is_part = bool(before_R) or may_be_part(history, size, chosen=chosen)
    label = "minimum number of equal batches in a row"
    return Sign(
        f"the last {least} steps all used the same batch",
        (Quantity(key="batch.equal_run", label=label, value=float(least), unit="steps"),),
        severity=Severity.WARNING if is_part else Severity.INFO,
    )
