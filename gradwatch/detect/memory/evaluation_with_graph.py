"""Find an evaluation that builds autograd graphs which nothing uses (GW702)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, final

from gradwatch.detect import Example
from gradwatch.detect.features.events import events_of
from gradwatch.detect.features.finding import finding_of
from gradwatch.events import EVALUATED_WITH_GRAPH, GRAPH_KEPT, MODE_VALIDATION
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Finding, Quantity, Severity


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationWithGraph:
    """An evaluation builds autograd graphs that nothing uses.

    What it measures: forward passes of the model in evaluation mode that built a graph, without a backward pass.

    Why it matters: each pass keeps all its activations until its result is dropped. If the losses are summed as
    tensors, the activations of the whole evaluation are in memory at once. The numbers are right either way.

    Example: `model.eval()` and then `val_loss += criterion(model(x), y)`, without `torch.no_grad()`.

    What to do: run the evaluation under `torch.inference_mode()` or `torch.no_grad()`.

    When it is wrong: outputs in evaluation mode that are kept for a backward pass after the next update.

    How it is detected: a hook on each whole model counts its forward passes in evaluation mode whose outputs have a
    graph. A hook on the node of the output shows whether a backward pass goes through it. At least three passes without
    one, until after the next update, count. If all their graphs were alive at once, at least `alive`, the memory grows
    with each batch of the evaluation, and the finding is a warning; otherwise it is information. The hook is removed at
    the first evaluation without a graph. It does not see evaluations in training mode, or of parts of a model.

    Source: PyTorch, Autograd mechanics ("Evaluation Mode"), https://pytorch.org/docs/stable/notes/autograd.html.

    Args:
        every: Steps between two calls. 5: soon after the first evaluation.
        alive: Graphs of an evaluation at the same time that show that it keeps them. 4: a loop holds the outputs of one
            pass while the next one runs, and averages two or three passes on the same samples.
    """

    code: ClassVar[str] = "GW702"
    kind: ClassVar[str] = "evaluation-with-graph"
    runs_at_end: ClassVar[bool] = True
    every: int = 5
    alive: int = 4

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding if an evaluation built graphs."""
        if event := next(events_of(history, EVALUATED_WITH_GRAPH), None):
            num_passes, num_alive = event.values["passes"], event.values.get("alive", 0)  # older runs do not have it
            passes = Quantity(key="evaluation.passes", value=num_passes, label="passes without a use")
            alive = Quantity(key="evaluation.alive", value=num_alive, label="graphs alive at once")
            are_kept = num_alive >= max(self.alive, num_passes)
            severity = Severity.WARNING if are_kept else Severity.INFO
            yield finding_of(self, history, event.text, passes, alive, severity=severity, onset=event.step)

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, and that stay quiet."""
        text = EVALUATED_WITH_GRAPH.text.format(passes=8, at=", at train.py:52: `output = model(x)`", kept="")
        values = {"passes": 8, "alive": 8}
        bad = Synthetic(steps=40).add_event(EVALUATED_WITH_GRAPH, step=20, values=values, text=text)
        yield Example("a validation without no_grad", bad.history(), (None,))
        yield Example("a healthy run", Synthetic(steps=40).history())
        kept = Synthetic(steps=40).add_event(GRAPH_KEPT, step=16, values={"since": 2, "steps": 5})
        yield Example("graphs of training steps that are kept", kept.history())
        mode = Synthetic(steps=40).add_event(MODE_VALIDATION, step=16, values={})
        yield Example("a validation in training mode", mode.history())
