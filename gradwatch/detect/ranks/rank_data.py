"""Find ranks that train on the same data (GW602)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, final

from gradwatch.detect import Example
from gradwatch.detect.features.events import events_of
from gradwatch.detect.features.finding import finding_of
from gradwatch.events import (
    RANK_BATCHES_EQUAL,
    RANK_BATCHES_REPEATED,
    RANK_GRADIENTS_AGREE,
    RANK_WEIGHTS_AGREE,
    EventKind,
)
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Finding, Quantity


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RankData:
    """Ranks that train on the same batches.

    What it measures: whether ranks have batches with equal hashes, at one step or at different steps.

    Why it matters: the average over ranks then averages equal gradients. The training costs as much as on all ranks,
    and learns as slowly as on one. Batches that return in another order count samples twice in an epoch.

    Example: `DataLoader(dataset, shuffle=True)` with the same seed on each rank, without a `DistributedSampler`.

    What to do: give the DataLoader `sampler=DistributedSampler(dataset)`, and call `sampler.set_epoch(epoch)` before
    each epoch. For a stream, take every n-th sample, starting at the rank.

    When it is wrong: ranks that share a batch on purpose, as in tensor parallelism. Pass `batch=None` to
    `monitor.step` there.

    How it is detected: three successive steps at which two ranks have equal batches; or a tenth of a rank's batches,
    and at least five, that another rank had at other steps.

    Source: PyTorch, torch.utils.data.distributed.DistributedSampler,
    https://pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler.

    Args:
        every: Steps between two checks. 5: batches are compared at every step.
        patience: Steps after the first equal batch before the report. 0: the comparison has waited for three.
    """

    code: ClassVar[str] = "GW602"
    kind: ClassVar[str] = "rank-data"
    every: int = 5
    patience: int = 0

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding for the first two ranks with equal batches."""
        for kind in (RANK_BATCHES_EQUAL, RANK_BATCHES_REPEATED):
            if event := next(events_of(history, kind), None):
                ranks = [
                    Quantity(key=key, value=event.values[name], label=label)
                    for key, name, label in (("rank", "rank", ""), ("rank.other", "other", "other rank"))
                ]
                yield finding_of(self, history, event.text, *ranks, onset=event.step)
                return

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, and that stay quiet."""
        yield Example("all ranks shuffle with one seed", _example(RANK_BATCHES_EQUAL, {"rank": 0, "other": 1}), (None,))
        repeated = {"rank": 1.0, "other": 0.0, "batches": 5.0, "of": 20.0}
        yield Example("the shards of two ranks overlap", _example(RANK_BATCHES_REPEATED, repeated), (None,))
        yield Example("a healthy run", Synthetic(steps=60).history())
        agree = Synthetic(steps=60).add_event(RANK_GRADIENTS_AGREE).add_event(RANK_WEIGHTS_AGREE)
        yield Example("ranks with equal gradients and batches of their own", agree.history())
        later = Synthetic(steps=60).add_event(RANK_BATCHES_EQUAL, step=80, values={"rank": 0, "other": 1})
        yield Example("equal batches of a later step are not known yet", later.history())


def _example(kind: EventKind, values: dict[str, float]) -> History:
    return Synthetic(steps=60).add_event(kind, step=3, values=values, text=kind.text.format(**values)).history()
