"""Find losses and layers that mix the wrong numbers, in the events of the probe that reads the autograd graph.

From predictions (n, 1) and targets (n,) come n x n differences, and the model can learn only their mean. So does a
single prediction, which a model that pools over all samples makes for n targets. Calling `view` instead of `transpose`
mixes classes with time: the softmax then covers other values than the outputs at one position. A recurrent layer that
gets (samples, steps, features) without `batch_first=True` runs along the samples. Labels that both the data set and the
model shift are the token after the next one. A mask that is the opposite of what was meant lets an attention see
nothing but padding. An error that is averaged before it is squared has one gradient for all samples, and an index too
many gives all samples of a batch one target.
"""

from __future__ import annotations

from collections.abc import Iterator

from gradwatch.detect.data_and_loss.loss_plateau_rules.progress import loss_evidence
from gradwatch.detect.features.events import events_of
from gradwatch.detect.features.finding import Sign
from gradwatch.events import (
    BROADCAST,
    MIXED_AXES,
    OUTPUTS_AVERAGED,
    PADDING_ATTENDED,
    POOLED,
    SEQUENCE_AXIS,
    TARGETS_AHEAD,
    TARGETS_SHARED,
    TARGETS_UNREACHABLE,
)
from gradwatch.history.store import History
from gradwatch.records import Quantity, Severity


def find_wrong_pairs(history: History) -> Iterator[Sign]:
    """Yield a sign for each loss that compares wrong pairs, and for each layer that mixes the samples of a batch."""
    for kind in (BROADCAST, POOLED, MIXED_AXES, TARGETS_AHEAD):
        for event in events_of(history, kind):
            text = f"the loss compares the wrong pairs: {event.text}"
            yield Sign(text, loss_evidence(history), event.step, layer=event.layer, severity=Severity.WARNING)
    for kind, effect in ((OUTPUTS_AVERAGED, "sees only the mean of the outputs"), (TARGETS_SHARED, "has one target")):
        for event in events_of(history, kind):
            text = f"the loss {effect} for each batch: {event.text}"
            yield Sign(text, loss_evidence(history), event.step, severity=Severity.WARNING)
    for kind, effect in ((SEQUENCE_AXIS, "runs along the batch"), (PADDING_ATTENDED, "attends to padding")):
        for event in events_of(history, kind):
            text = f"{event.layer or 'a layer'} {effect}: {event.text}"
            yield Sign(text, loss_evidence(history), event.step, layer=event.layer, severity=Severity.WARNING)


def find_unreachable_targets(history: History, *, unreachable: float) -> Iterator[Sign]:
    """Yield a sign if the last activation cannot give some targets of a squared error.

    Args:
        history: History of the run.
        unreachable: Minimum fraction of the variance of the targets that stays whatever the model learns.
    """
    for event in events_of(history, TARGETS_UNREACHABLE):
        if (share := event.values["share"]) >= unreachable:
            evidence = (
                Quantity(key="targets.unreachable", label="loss that stays", value=share, unit="of the variance"),
                Quantity(key="targets.farthest", label="farthest target", value=event.values["target"]),
            )
            text = f"the loss cannot fall below {100 * share:.0f} % of the variance of the targets: {event.text}"
            yield Sign(text, evidence, event.step, layer=event.layer, severity=Severity.WARNING)
