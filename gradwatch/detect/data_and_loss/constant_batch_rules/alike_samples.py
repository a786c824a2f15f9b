"""Find batches of the same samples in another order or with noise, in the events of the probe that compares them.

The probe compares the samples of steps 0, 1, 8, 10, 20 and 30, in batches of at most 256 on the CPU. They are alike if
each sample is far nearer to one in the first batch than two samples of a batch are to each other. The numbers of each
sample are compared sorted too, which undoes flips, turns and rolls. If the loop hands over no batches, the probe
compares the inputs of the model in training, or of the parts of it that the loop calls.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from gradwatch.detect.data_and_loss.constant_batch_rules.batch_size import is_surely_part, may_be_part
from gradwatch.detect.features.events import events_of
from gradwatch.detect.features.finding import Sign
from gradwatch.events import BATCH_ALIKE, INPUTS_ALIKE
from gradwatch.history.store import History
from gradwatch.records import Quantity, Severity


def find_alike_samples(history: History, *, chosen: int) -> Iterator[Sign]:
    """Yield a sign for samples that come again; a warning if their number, up to `chosen`, is one of a batch."""
    is_handed_over = not math.isnan(history.run.newest("batch_hash")[0])
    for kind in (BATCH_ALIKE,) if is_handed_over else (BATCH_ALIKE, INPUTS_ALIKE):
        for event in events_of(history, kind):
            values, label = event.values, "median distance to the nearest sample"
            is_created_again = values.get("exact", 0.0) > values.get("held", 0.0)  # equal, and in other memory
            is_part = (may_be_part if is_created_again else is_surely_part)(history, values["samples"], chosen=chosen)
            yield Sign(
                f"the first {event.step + 1} steps use the same samples, reordered or with noise",
                (Quantity(key="batch.nearest_distance", label=label, value=values["distance"], unit="of usual"),),
                severity=Severity.WARNING if is_part else Severity.INFO,
            )
