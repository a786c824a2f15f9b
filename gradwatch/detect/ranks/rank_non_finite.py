"""Find the rank where NaN or Inf came from (GW604)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, final

from gradwatch.detect import Example
from gradwatch.detect.features.events import events_of
from gradwatch.detect.features.finding import finding_of
from gradwatch.events import BATCH_FINITE, BATCH_NONFINITE, RANK_LOSS_NONFINITE
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Event, Finding, Quantity, Severity


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RankNonFinite:
    """NaN or Inf that came from one rank.

    What it measures: whether the loss of each rank is finite, at every step.

    Why it matters: the average over ranks carries a NaN of one rank to all others within the same step. Their own data
    and formulas are fine, so a search on rank 0 finds nothing.

    Example: `x[3, 4] = float("nan")` in a shard that only rank 1 reads.

    What to do: look at the batch of that rank and step. `gradwatch.watch(..., record=True)` on all ranks keeps it in
    the run directory of the rank.

    When it is wrong: a loop that passes its loss on one rank only, if another rank has the NaN.

    How it is detected: the first step at which the loss is not finite on some ranks, and finite on the others. The
    finding says whether the inputs of that rank hold NaN or Inf.

    Source: PyTorch, DistributedDataParallel,
    https://pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html.

    Args:
        every: Steps between two checks. 5: losses are compared at every step.
        patience: Steps after the NaN before the report. 0: one NaN is enough.
    """

    code: ClassVar[str] = "GW604"
    kind: ClassVar[str] = "rank-non-finite"
    every: int = 5
    patience: int = 0

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding for the rank with the first loss that is not finite."""
        event = next(events_of(history, RANK_LOSS_NONFINITE), None)
        if event is None:
            return
        rank, inputs = int(event.values["rank"]), _inputs(history, event)
        source = {1: ", whose inputs hold NaN or Inf", 0: ", whose inputs are finite"}.get(inputs, "")
        yield finding_of(
            self,
            history,
            f"NaN or Inf came from rank {rank}{source}; the other ranks had a finite loss at that step",
            Quantity(key="rank", value=float(rank)),
            Quantity(key="rank.inputs_nonfinite", value=float(inputs), label="inputs that hold NaN or Inf"),
            severity=Severity.CRITICAL,
            onset=event.step,
        )

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, and that stay quiet."""
        bad = Synthetic(steps=60).add_event(RANK_LOSS_NONFINITE, step=20, values={"rank": 1, "inputs": 1})
        yield Example("a sample of rank 1 has a NaN", bad.history(), (None,))
        yield Example("a healthy run", Synthetic(steps=60).history())
        all_bad = Synthetic(steps=60).add_event(BATCH_NONFINITE, step=20)
        yield Example("all ranks have a NaN at one step", all_bad.history())
        later = Synthetic(steps=60).add_event(RANK_LOSS_NONFINITE, step=80, values={"rank": 1, "inputs": 1})
        yield Example("a NaN of a later step is not known yet", later.history())


def _inputs(history: History, event: Event) -> int:
    """Return whether the inputs of the rank hold NaN or Inf: 1, 0, or -1 if it is unknown."""
    if event.values["rank"]:
        return int(event.values["inputs"])
    # rank 0 has its own events
    known = {BATCH_NONFINITE: 1, BATCH_FINITE: 0}
    return next((value for kind, value in known.items() for e in events_of(history, kind) if e.step == event.step), -1)
