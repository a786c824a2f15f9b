"""Find settings that differ between the ranks (GW605)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, final

from gradwatch.detect import Example
from gradwatch.detect.features.events import events_of
from gradwatch.detect.features.finding import finding_of
from gradwatch.events import (
    RANK_BUFFERS_DIFFER,
    RANK_DRAWS_EQUAL,
    RANK_GRADIENTS_AGREE,
    RANK_RATES_DIFFER,
    RANK_WEIGHTS_AGREE,
)
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Event, Finding, Quantity, Severity


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RankSetting:
    """A setting that differs between the ranks.

    What it measures: whether the learning rates and the buffers are equal on all ranks, and whether the random numbers
    of the forward pass are not.

    Why it matters: ranks that make different updates from the same gradient have different weights from then on. If
    running statistics differ, only the buffers of rank 0 are saved. Equal dropout masks on all ranks regularize less.

    Example: a ReduceLROnPlateau scheduler that gets the validation loss of its own rank; batch normalization with
    `broadcast_buffers=False`; `torch.manual_seed(0)` on all ranks.

    What to do: average the validation loss over the ranks before the scheduler gets it, and step the scheduler on all
    ranks. Use SyncBatchNorm, or leave `broadcast_buffers` on. Seed with `seed + rank` after the model is made.

    When it is wrong: running statistics that each rank has for itself on purpose. Equal draws are right in tensor
    parallelism, where the ranks share an activation.

    How it is detected: learning rates at every step, and the norm of the buffers and the random state at the first 5
    steps and at powers of two, when the forward pass begins. Values differ if they do by more than a rounding error,
    1e-4. Buffers and random states must show it twice.

    Source: PyTorch, ReduceLROnPlateau,
    https://pytorch.org/docs/stable/generated/torch.optim.lr_scheduler.ReduceLROnPlateau.html.

    Args:
        every: Steps between two checks. 5: rates are compared at every step.
        patience: Steps for which the rates must differ. 0: one update is enough.
    """

    code: ClassVar[str] = "GW605"
    kind: ClassVar[str] = "rank-setting"
    every: int = 5
    patience: int = 0

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding for the first setting that differs."""
        if event := next(events_of(history, RANK_RATES_DIFFER), None):
            values = event.values
            rates = (
                Quantity(key="rank.rate", value=values["rate"], label="its learning rate"),
                Quantity(key="rank.usual_rate", value=values["usual"], label="learning rate of the others"),
            )
            yield self._finding(history, event, event.text, *rates, severity=Severity.CRITICAL)
        if event := next(events_of(history, RANK_BUFFERS_DIFFER), None):
            differ = Quantity(key="rank.buffers", value=1.0, label="buffers that differ")
            text = "the buffers, such as running statistics, differ between the ranks"
            yield self._finding(history, event, text, differ)
        if event := next(events_of(history, RANK_DRAWS_EQUAL), None):
            equal = Quantity(key="rank.draws", value=event.values["other"], label="rank with equal draws")
            text = f"{event.text} in the forward pass, so their dropout masks are equal"
            yield self._finding(history, event, text, equal)

    def _finding(
        self,
        history: History,
        event: Event,
        message: str,
        *evidence: Quantity,
        severity: Severity = Severity.WARNING,
    ) -> Finding:
        rank = [] if event.values["rank"] < 0 else [Quantity(key="rank", value=event.values["rank"])]
        return finding_of(self, history, message, *rank, *evidence, severity=severity, onset=event.step)

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, and that stay quiet."""
        values = {"rank": 1.0, "group": 0.0, "rate": 1e-4, "usual": 1e-3}
        text = RANK_RATES_DIFFER.text.format(**values)
        bad = Synthetic(steps=60).add_event(RANK_RATES_DIFFER, step=20, values=values, text=text)
        yield Example("the schedule of rank 1 falls alone", bad.history(), (None,))
        buffers = Synthetic(steps=60).add_event(RANK_BUFFERS_DIFFER, step=2, values={"rank": -1})
        yield Example("running statistics are not broadcast", buffers.history(), (None,))
        draws = Synthetic(steps=60).add_event(RANK_DRAWS_EQUAL, values={"rank": 0, "other": 1})
        yield Example("all ranks have one seed", draws.history(), (None,))
        yield Example("a healthy run", Synthetic(steps=60).history())
        agree = Synthetic(steps=60).add_event(RANK_GRADIENTS_AGREE).add_event(RANK_WEIGHTS_AGREE)
        yield Example("ranks that agree", agree.history())
        later = Synthetic(steps=60).add_event(RANK_BUFFERS_DIFFER, step=80, values={"rank": -1})
        yield Example("buffers that differ at a later step are not known yet", later.history())
