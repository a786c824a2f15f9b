"""Find memory that grows until it is full (GW703)."""

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
from gradwatch.records import Finding, Quantity

GIGABYTE = 1e9


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryGrowth:
    """Memory in use grows evenly, and will be full before the training ends.

    What it measures: the bytes of the tensors on the GPU, or else of the process (on Linux), once a second.

    Why it matters: when the memory is full, the training ends with an error, or the system ends the process without
    one.

    Example: `features.append(encoder(x).detach())` in each step, for a list that is never emptied.

    What to do: look for a list, a dictionary or a cache that gets longer at every step; move what must be kept to disk,
    or keep a fixed number of it. With GW701, keep no tensor with a graph.

    When it is wrong: a buffer or a cache of the data that will soon have its full size, which is more than half of the
    memory that was free.

    How it is detected: the readings after the first quarter are split into four equal parts. The growth from part to
    part is even if the slowest is at least half of the fastest. It counts once the memory that is left will last for no
    more steps than the run has had, and, if the number of steps is known, will not last to the end. Files that the
    process maps do not count, and the limit of a container does.

    Source: PyTorch, Frequently Asked Questions ("My model reports 'cuda runtime error(2): out of memory'"),
    https://pytorch.org/docs/stable/notes/faq.html.

    Args:
        every: Steps between two calls. 10: the memory is read once a second.
    """

    code: ClassVar[str] = "GW703"
    kind: ClassVar[str] = "memory-growth"
    runs_at_end: ClassVar[bool] = True
    every: int = 10

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding if the memory will be full."""
        if event := next(events_of(history, MEMORY_GROWS), None):
            evidence = (
                Quantity(key="memory.rate", value=event.values["rate"] / 1e6, unit="MB", label="growth per step"),
                Quantity(key="memory.used", value=event.values["used"] / GIGABYTE, unit="GB", label="in use"),
                Quantity(key="memory.left", value=event.values["left"] / GIGABYTE, unit="GB", label="left"),
                Quantity(key="memory.steps", value=event.values["steps"], label="steps until it is full"),
            )
            yield finding_of(self, history, event.text, *evidence, onset=event.step)

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, and that stay quiet."""
        values = {"rate": 2e6, "used": 9e9, "left": 4e9, "steps": 2000.0}
        text = MEMORY_GROWS.text.format(**values, megabytes=2.0)
        bad = Synthetic(steps=60).add_event(MEMORY_GROWS, step=40, values=values, text=text)
        yield Example("a list that gets longer at every step", bad.history(), (None,))
        yield Example("a healthy run", Synthetic(steps=60).history())
        kept = Synthetic(steps=60).add_event(GRAPH_KEPT, step=16, values={"since": 2, "steps": 5})
        yield Example("graphs that are kept, with much memory left", kept.history())
        pieces = {"split": 8e9, "reserved": 2e10, "retries": 5.0}
        fragmented = Synthetic(steps=60).add_event(MEMORY_FRAGMENTED, step=40, values=pieces)
        yield Example("memory that is fragmented", fragmented.history())
