"""Find gradients that are not averaged over the ranks (GW603)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, final

from gradwatch.detect import Example
from gradwatch.detect.features.events import events_of
from gradwatch.detect.features.finding import finding_of, format_factor
from gradwatch.detect.features.rank_states import (
    are_averaged,
    gradients_differ,
    has_lasted,
    weights_agree,
    weights_differ,
)
from gradwatch.events import (
    RANK_FACTOR,
    RANK_GRADIENTS_AGREE,
    RANK_GRADIENTS_DIFFER,
    RANK_WEIGHTS_AGREE,
    RANK_WEIGHTS_DIFFER,
)
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Finding, Quantity, Severity

VALUES = {"rank": -1, "parameters": 12, "difference": 0.3, "clipped": 0}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class UnsynchronizedGradient:
    """Gradients that are not averaged over the ranks, or not correctly.

    What it measures: whether the norms of all gradients are equal on all ranks, when they are clipped or, without
    clipping, when the optimizer uses them.

    Why it matters: without an average, each rank trains a model of its own, and the models drift apart. Gradients that
    are clipped before the average keep their own scale for each rank: the average has another direction, and the
    threshold is not the one that was set.

    A sum instead of an average multiplies the learning rate by the number of ranks.

    Example: `model.module(inputs)` instead of `model(inputs)` with DistributedDataParallel; a `no_sync()` block that
    contains the last micro-batch; `clip_grad_norm_` before a hand-written all-reduce.

    What to do: call the wrapped model, leave `no_sync()` for the last micro-batch, and clip after the average.

    When it is wrong: a parameter that each rank has for itself on purpose, such as its experts. A loop that divides its
    loss by the number of ranks, and then sums the gradients.

    How it is detected: DistributedDataParallel leaves equal gradients on all ranks, to the bit. The finding is reported
    if norms differ by more than 1e-4, do not agree again, and the weights drift apart. If the weights stay equal, an
    average must follow the reading. It is then reported only if the gradients were clipped at that point; an optimizer
    that averages by itself, or weights that are averaged every few steps, are not reported. At the first 5 steps and at
    powers of two, some gradients are also read before they are averaged: their mean inner product with the gradient of
    the update shows how many times their average it is.

    Source: PyTorch, DistributedDataParallel,
    https://pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html.

    Args:
        every: Steps between two checks. 10: weights are sampled as often.
        patience: Steps for which gradients must differ. 20: two samples of the weights, so that weights that are
            averaged now and then can show.
    """

    code: ClassVar[str] = "GW603"
    kind: ClassVar[str] = "unsynchronized-gradient"
    every: int = 10
    patience: int = 20

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding for gradients that are not averaged over the ranks."""
        if event := next(events_of(history, RANK_FACTOR), None):
            factor = Quantity(key="rank.factor", value=event.values["factor"], label="gradient / average")
            what = "summed over the ranks" if event.values["factor"] > 1 else "divided twice by the number of ranks"
            message = f"the gradients are {what}: {format_factor(event.values['factor'])} times their average"
            yield finding_of(self, history, message, factor, onset=event.step)
            return
        found = gradients_differ(history)
        if found is None or not has_lasted(history, found.since, self.patience):
            return
        whose = f"the gradient of {', '.join(found.layers)} is" if found.layers else "the gradients are"
        weights = weights_differ(history)
        if weights is not None and not are_averaged(history, found.since):
            message = f"{whose} not averaged over the ranks, and the weights drift apart"
        elif found.events[0].values["clipped"] and weights_agree(history):
            message = f"{whose} clipped before the average over the ranks"
        else:
            return
        yield finding_of(
            self,
            history,
            message,
            *found.evidence(),
            layers=found.layers,
            severity=Severity.CRITICAL if weights else Severity.WARNING,
            onset=found.since,
        )

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, that stay quiet, and near misses."""
        raw = Synthetic(steps=60).add_event(RANK_GRADIENTS_DIFFER, step=0, values=VALUES)
        raw.add_event(RANK_WEIGHTS_AGREE, step=0)
        raw.add_event(RANK_WEIGHTS_DIFFER, step=10, values=VALUES)
        yield Example("the loop calls the model without its wrapper", raw.history(), (None,))
        layer = Synthetic(steps=60).add_event(RANK_GRADIENTS_AGREE, step=0)
        layer.add_event(RANK_GRADIENTS_DIFFER, step=20, layer="layers.3.weight", values=VALUES)
        layer.add_event(RANK_WEIGHTS_DIFFER, step=30, layer="layers.3.weight", values=VALUES)
        yield Example("one parameter is left out of the average", layer.history(), ("layers.3.weight",))
        clipped = Synthetic(steps=60).add_event(RANK_GRADIENTS_DIFFER, step=0, values=VALUES | {"clipped": 1})
        yield Example(
            "gradients are clipped before the average", clipped.add_event(RANK_WEIGHTS_AGREE).history(), (None,)
        )
        summed = Synthetic(steps=60).add_event(RANK_FACTOR, values={"factor": 4, "ranks": 4})
        yield Example("the gradients are summed, and never divided", summed.history(), (None,))
        own = Synthetic(steps=60).add_event(RANK_GRADIENTS_DIFFER, step=0, values=VALUES)
        yield Example("the optimizer averages the gradients itself", own.add_event(RANK_WEIGHTS_AGREE).history())
        local = Synthetic(steps=60).add_event(RANK_GRADIENTS_DIFFER, step=0, values=VALUES)
        local.add_event(RANK_WEIGHTS_DIFFER, step=10, values=VALUES).add_event(RANK_WEIGHTS_AGREE, step=8)
        yield Example("the weights are averaged every 8 steps", local.history())
        yield Example("a healthy run", Synthetic(steps=60).add_event(RANK_GRADIENTS_AGREE).history())
