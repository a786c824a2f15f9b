"""Find autograd graphs of earlier steps that are kept in memory (GW701)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, final

from gradwatch.detect import Example
from gradwatch.detect.features.events import events_of
from gradwatch.detect.features.finding import finding_of
from gradwatch.events import EVALUATED_WITH_GRAPH, GRAPH_KEPT, MEMORY_GROWS
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Finding, Quantity


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class GraphLeak:
    """The autograd graphs of earlier steps are kept in memory.

    What it measures: whether the graphs of five successive steps are all alive ten steps later.

    Why it matters: a tensor with a graph keeps the nodes of all operations that led to it, and of a graph without a
    backward pass also the activations. The memory grows at every step until it is full.

    Example: `total += loss`, `losses.append(loss)`, or a hidden state that goes into the next step without `detach()`.

    What to do: keep numbers or detached tensors: `total += loss.detach()`, `losses.append(loss.item())`,
    `hidden = hidden.detach()`.

    When it is wrong: a loop that keeps the graphs of its last 15 steps or more on purpose, for one late backward pass.

    How it is detected: the autograd nodes of outputs and losses get a mark at steps 2 to 6. A mark dies with the last
    of its nodes. If all five marks are alive at step 16, also after a run of the garbage collector, the variables of
    the functions on the stack and the attributes of the model are searched for the tensor that keeps them. The line is
    the one that writes to this variable. The check is repeated from step 64, 512, 4096 and so on: a leak may begin
    later. The graph of a tensor that is kept once, such as the best loss so far, is not a leak. A list that is emptied
    after an epoch counts if the first one has at least 17 steps: all of it is in memory at the end of the longest one.

    Source: PyTorch, Frequently Asked Questions ("Don't accumulate history across your training loop"),
    https://pytorch.org/docs/stable/notes/faq.html.

    Args:
        every: Steps between two calls. 8: the first check is at step 16.
    """

    code: ClassVar[str] = "GW701"
    kind: ClassVar[str] = "graph-leak"
    runs_at_end: ClassVar[bool] = True
    every: int = 8

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding if the graphs of earlier steps are kept."""
        if event := next(events_of(history, GRAPH_KEPT), None):
            steps = Quantity(key="graph.kept", value=event.values["steps"], label="graphs alive of those marked")
            yield finding_of(self, history, event.text, steps, onset=int(event.values["since"]))

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, and that stay quiet."""
        values = {"since": 2.0, "steps": 5.0}
        text = GRAPH_KEPT.text.format(**values, by=" by `total`, train.py:41: `total += loss`")
        leak = Synthetic(steps=40).add_event(GRAPH_KEPT, step=16, values=values, text=text)
        yield Example("a sum of losses with their graphs", leak.history(), (None,))
        yield Example("a healthy run", Synthetic(steps=40).history())
        evaluation = Synthetic(steps=40).add_event(EVALUATED_WITH_GRAPH, step=16, values={"passes": 8})
        yield Example("an evaluation with graphs that are freed", evaluation.history())
        grows = Synthetic(steps=40).add_event(MEMORY_GROWS, step=16, values={"rate": 1e6})
        yield Example("memory that grows without a graph", grows.history())
