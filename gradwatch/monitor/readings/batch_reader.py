"""Read the inputs of a step: their hash, their number, and whether they are finite."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from gradwatch.monitor.best_effort import best_effort
from gradwatch.monitor.context import MonitorContext
from gradwatch.monitor.host_stats import num_samples
from gradwatch.probe.batches.batch_hash import checksums, finite_flag, is_finite, native_hash
from gradwatch.probe.batches.equal_samples import EqualSamples
from gradwatch.probe.batches.origin import UnreadBatch
from gradwatch.probe.batches.repeated_samples import RepeatedSamples


class BatchReading(NamedTuple):
    """The readings of a batch.

    Args:
        run: Statistics of the run.
        checksums: Checksums for the hash, with a tensor for each checksum on the device. None if the hash is known.
        readings: `batch`, the checksums on the device, and `finite`, whether all values of the batch are finite.
    """

    run: Mapping[str, float]
    checksums: Sequence[int | Tensor] | None
    readings: Mapping[str, Tensor]


NO_BATCH = BatchReading({}, None, {})


@final
class BatchReader:
    """Reads the batches of a run.

    Args:
        device: Device of the model.
        context: Shared by the parts of the monitor.
    """

    def __init__(self, device: torch.device, context: MonitorContext) -> None:
        self.attempts = context.attempts
        self._device = device
        self._context, self._events = context, context.events
        self._samples, self._equal = RepeatedSamples(), EqualSamples()
        self._unread = UnreadBatch()

    def read(self, batch: Any, *, step: int, run: Mapping[str, float]) -> BatchReading:
        """Read a batch.

        Args:
            batch: The step's inputs, any nest of tensors, or None.
            step: Optimizer step.
            run: The statistics of the step so far.
        """
        if batch is None:
            return NO_BATCH
        reading = self._read(batch, step, run) or NO_BATCH
        self._compare(batch, step)
        return reading

    @best_effort("the batch hash")
    def _read(self, batch: Any, step: int, run: Mapping[str, float]) -> BatchReading:
        statistics: dict[str, float] = {}
        readings: dict[str, Tensor] = {}
        parts: Sequence[int | Tensor] | None = None
        known = native_hash(batch)  # None if the extension cannot read the batch in place
        if known is not None:
            statistics["batch_hash"] = float(known)
        else:
            parts = checksums(batch) or None  # None for a batch without data: it does not equal the next one
            # one tensor for all checksums, so that the row needs one transfer for them
            if remote := [part.to(self._device, non_blocking=True) for part in parts or () if isinstance(part, Tensor)]:
                readings["batch"] = torch.stack(remote)
        if not self._events.has_batch:
            if self._context.is_deferred:  # the loss may not be known yet: `RowQueue` reads the flag when it is
                flag = finite_flag(batch, self._device)
                readings |= {"finite": flag} if flag is not None else {}
            elif not math.isfinite(run.get("loss", 0.0)):
                self._events.batch(step=step, is_clean=is_finite(batch))
        if "samples_per_s" not in run and (samples := num_samples(batch)) is not None:
            statistics["samples_per_s"] = 1e3 * samples / run["step_ms"]
        return BatchReading(statistics, parts, readings)

    @best_effort("the comparison of batches")
    def _compare(self, batch: Any, step: int) -> None:
        # a comparison of all samples would wait for the device
        if not self._context.is_deferred:
            for event in self._samples.inspect(batch, step=step):
                self._context.pipeline.add_event(event)
        if self._context.is_deferred or self._samples.has_no_rows:
            for event in self._unread.inspect(batch, step=step):
                self._context.pipeline.add_event(event)
        for event in self._equal.inspect(batch, step=step):
            self._context.pipeline.add_event(event)
