"""Find CUDA memory that is lost in unusable pieces (GW704)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, final

from gradwatch.detect import Example
from gradwatch.detect.features.events import events_of
from gradwatch.detect.features.finding import finding_of
from gradwatch.events import GRAPH_KEPT, MEMORY_FRAGMENTED, MEMORY_GROWS
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Finding, Quantity, Severity

GIGABYTE = 1e9


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFragmentation:
    """CUDA memory is lost in pieces that are too small to use.

    What it measures: the statistics of PyTorch's CUDA allocator, once a second.

    Why it matters: an allocation that finds no piece of its size makes the allocator free its cache and ask the driver
    again, which waits for the device. If that fails, the training runs out of memory with gigabytes unused.

    Example: batches that differ in length, such as `pad_sequence(batch)` without a fixed maximum.

    What to do: set `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True` in the environment, or pad to a few fixed sizes.

    When it is wrong: two retries long ago, next to pieces that a later step will use.

    How it is detected: at least two allocations had to be tried again, and at least a fifth of the reserved memory is
    in inactive pieces of split blocks.

    Source: PyTorch, CUDA semantics ("Optimizing memory usage with PYTORCH_CUDA_ALLOC_CONF"),
    https://pytorch.org/docs/stable/notes/cuda.html.

    Args:
        every: Steps between two calls. 10: the memory is read once a second.
    """

    code: ClassVar[str] = "GW704"
    kind: ClassVar[str] = "memory-fragmentation"
    runs_at_end: ClassVar[bool] = True
    every: int = 10

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding if the memory is fragmented."""
        if event := next(events_of(history, MEMORY_FRAGMENTED), None):
            evidence = (
                Quantity(key="memory.split", value=event.values["split"] / GIGABYTE, unit="GB", label="unusable"),
                Quantity(key="memory.reserved", value=event.values["reserved"] / GIGABYTE, unit="GB", label="reserved"),
                Quantity(key="memory.retries", value=event.values["retries"], label="allocations tried again"),
            )
            yield finding_of(self, history, event.text, *evidence, severity=Severity.INFO, onset=event.step)

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, and that stay quiet."""
        values = {"split": 8e9, "reserved": 2e10, "retries": 5.0}
        text = MEMORY_FRAGMENTED.text.format(**values, gigabytes=8.0, of=20.0)
        bad = Synthetic(steps=60).add_event(MEMORY_FRAGMENTED, step=40, values=values, text=text)
        yield Example("batches of many lengths", bad.history(), (None,))
        yield Example("a healthy run", Synthetic(steps=60).history())
        kept = Synthetic(steps=60).add_event(GRAPH_KEPT, step=16, values={"since": 2, "steps": 5})
        yield Example("graphs that are kept", kept.history())
        growth = {"rate": 2e6, "used": 9e9, "left": 4e9, "steps": 2000.0}
        yield Example("memory that grows", Synthetic(steps=60).add_event(MEMORY_GROWS, values=growth).history())
