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
    RANK_GRADIENTS_AGREE,
    RANK_ORDER_REPEATED,
    RANK_SAMPLES_SHARED,
    RANK_WEIGHTS_AGREE,
    EventKind,
)
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Finding, Quantity


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RankData:
    """Ranks that train on the same data, or on the same order of it in each epoch.

    What it measures: whether ranks have equal batches at a step, or equal samples in an epoch; and whether a sampler
    gives two epochs the same order.

    Why it matters: the average over ranks then averages equal gradients. The training costs as much as on all ranks,
    and learns as slowly as on one. Samples that several ranks have in an epoch are counted several times. If every
    epoch has the same order, a sample always meets the same others in its batch.

    Example: `DataLoader(dataset, shuffle=True)` on each rank, without a `DistributedSampler`; ranges of samples that
    overlap; a `DistributedSampler` without `set_epoch`.

    What to do: give the DataLoader `sampler=DistributedSampler(dataset)`, and call `sampler.set_epoch(epoch)` before
    each epoch. For a stream, take every n-th sample, starting at the rank.

    When it is wrong: ranks that share a batch on purpose, as in tensor parallelism. Pass `batch=None` to
    `monitor.step` there.

    How it is detected: three successive steps at which two ranks have equal batches. Or a tenth of a rank's samples,
    by the hashes of at most 256 of them, that another rank has as well before any rank sees a sample again. So
    neither a second epoch nor draws with replacement are reported. Or two passes over a sampler that shuffles, with the
    same epoch number and as many steps.

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
        """Yield a finding for the first two ranks with equal data, or for equal epochs."""
        for kind in (RANK_BATCHES_EQUAL, RANK_SAMPLES_SHARED):
            if event := next(events_of(history, kind), None):
                ranks = [
                    Quantity(key=key, value=event.values[name], label=label)
                    for key, name, label in (("rank", "rank", ""), ("rank.other", "other", "other rank"))
                ]
                yield finding_of(self, history, event.text, *ranks, onset=event.step)
                return
        if event := next(events_of(history, RANK_ORDER_REPEATED), None):
            length = Quantity(key="rank.epoch_steps", value=event.values["steps"], label="steps of an epoch")
            message = "every epoch has the same order: nothing calls `set_epoch` of the sampler"
            yield finding_of(self, history, message, length, onset=event.step)

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, and that stay quiet."""
        yield Example("all ranks shuffle with one seed", _example(RANK_BATCHES_EQUAL, {"rank": 0, "other": 1}), (None,))
        shared = {"rank": 0.0, "other": 1.0, "shared": 0.25}
        yield Example("the shards of two ranks overlap", _example(RANK_SAMPLES_SHARED, shared, percent=25), (None,))
        order = Synthetic(steps=60).add_event(RANK_ORDER_REPEATED, step=20, values={"epoch": 0, "steps": 20})
        yield Example("the epochs of a sampler have the same order", order.history(), (None,))
        yield Example("a healthy run", Synthetic(steps=60).history())
        agree = Synthetic(steps=60).add_event(RANK_GRADIENTS_AGREE).add_event(RANK_WEIGHTS_AGREE)
        yield Example("ranks with equal gradients and batches of their own", agree.history())
        later = Synthetic(steps=60).add_event(RANK_BATCHES_EQUAL, step=80, values={"rank": 0, "other": 1})
        yield Example("equal batches of a later step are not known yet", later.history())


def _example(kind: EventKind, values: dict[str, float], **words: float) -> History:
    text = kind.text.format(**values, **words)
    return Synthetic(steps=60).add_event(kind, step=3, values=values, text=text).history()
