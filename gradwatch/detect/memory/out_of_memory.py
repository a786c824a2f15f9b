"""Find the allocation that failed and ended a training (GW705)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, final

from gradwatch.detect import Example
from gradwatch.detect.features.finding import finding_of
from gradwatch.events import ALLOCATION_FAILED, MEMORY_FRAGMENTED, MEMORY_GROWS
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Finding, Quantity, Severity

GIGABYTE = 1e9


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """The training ended because an allocation failed.

    What it measures: the exception that ended the training.

    Why it matters: the training cannot continue with these settings on this machine.

    Example: `DataLoader(data, batch_size=512)` for a model whose activations fit for 256 samples.

    What to do: `gradwatch plan CONFIG --budget 24GB` names the changes that fit, and their price. In your own loop, use
    smaller batches and accumulate, bfloat16, or activation checkpointing. Memory that grew before has another cause:
    see GW701 and GW703.

    When it is wrong: another process took the memory.

    How it is detected: the training ended with `torch.OutOfMemoryError`, a `MemoryError`, or the error of torch's
    allocator for the CPU. The exception is passed on as it was.

    Source: PyTorch, Frequently Asked Questions ("My model reports 'cuda runtime error(2): out of memory'"),
    https://pytorch.org/docs/stable/notes/faq.html.

    Args:
        every: Steps between two calls. 1000: the exception ends the run, and all findings of memory are made there.
    """

    code: ClassVar[str] = "GW705"
    kind: ClassVar[str] = "out-of-memory"
    runs_at_end: ClassVar[bool] = True
    every: int = 1000

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding if the training ran out of memory."""
        # a step that failed is not in the history, and it may be the first
        step = max(history.step, 0)
        if event := next((e for e in history.events if e.kind == ALLOCATION_FAILED.name and e.step <= step), None):
            evidence = [
                Quantity(key=f"memory.{key}", value=event.values[key] / GIGABYTE, unit="GB", label=label)
                for key, label in (("requested", "requested"), ("used", "in use"))
                if event.values[key] >= 0
            ]
            found = finding_of(self, history, event.text, *evidence, severity=Severity.CRITICAL, onset=event.step)
            yield replace(found, step=step)

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, and that stay quiet."""
        values = {"requested": 2e9, "used": 2.3e10}
        text = "out of memory: CUDA tried to allocate 1.86 GiB"
        bad = Synthetic(steps=40).add_event(ALLOCATION_FAILED, step=0, values=values, text=text)
        yield Example("a batch that does not fit", bad.history(), (None,))
        yield Example("a healthy run", Synthetic(steps=40).history())
        growth = {"rate": 2e6, "used": 9e9, "left": 4e9, "steps": 2000.0}
        yield Example("memory that grows", Synthetic(steps=40).add_event(MEMORY_GROWS, values=growth).history())
        pieces = {"split": 8e9, "reserved": 2e10, "retries": 5.0}
        fragmented = Synthetic(steps=40).add_event(MEMORY_FRAGMENTED, values=pieces)
        yield Example("memory that is fragmented", fragmented.history())
