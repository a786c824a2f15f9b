"""Find batches of the same samples, reordered or with noise, in the events of the probe that compares samples.

The probe compares the samples of steps 0, 1, 8, 10, 20 and 30, in batches of at most 256 on the CPU. Batches are alike
if each sample is far nearer to a sample of the first batch than two samples of one batch are to each other. The numbers
of each sample are also compared in sorted order, which undoes flips, turns and rolls. If the loop passes no batches,
the probe compares the inputs of the model in training, or of the parts of the model that the loop calls.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from gradwatch.detect.data_and_loss.constant_batch_rules.batch_origin import ALL_DATA, needs_one_batch
from gradwatch.detect.features.events import events_of
from gradwatch.detect.features.finding import Sign
from gradwatch.events import BATCH_ALIKE, INPUTS_ALIKE, LABELS_EQUAL, POLICY, SAMPLES_EQUAL, EventKind
from gradwatch.history.store import History
from gradwatch.records import Quantity, Severity

EQUAL, COPIED = "batch.equal_samples", "batch.copied_samples"
"""Keys of the evidence that all samples are the same, in the same or in different batches."""


def find_alike_samples(history: History, *, coordinates: int) -> Iterator[Sign]:
    """Yield a sign for repeated samples: a warning if there is more data.

    Args:
        history: History of the run.
        coordinates: Numbers of a sample up to which it may be a point at which an equation must hold.
    """
    for kind in _kinds(history):
        for event in events_of(history, kind):
            label, has_more = "median distance to the nearest sample", bool(event.values.get("part"))
            is_mistake = has_more and not needs_one_batch(history, coordinates=coordinates)
            text = f"the first {event.step + 1} steps use the same samples, reordered or with noise"
            yield Sign(
                text if has_more else text + ALL_DATA,
                (Quantity(key="batch.nearest_distance", label=label, value=event.values["distance"], unit="of usual"),),
                since=int(history.steps("loss")[0]),
                severity=Severity.WARNING if is_mistake else Severity.INFO,
            )


def find_equal_samples(history: History) -> Iterator[Sign]:
    """Yield a sign if all samples of a batch are the same, as black images are."""
    events = (event for kind in _kinds(history) for event in events_of(history, kind) if event.values.get("equal"))
    if event := next(events, None):
        yield Sign(
            "all samples are the same, so the inputs have no content",
            (Quantity(key=EQUAL, label="samples of a batch", value=event.values["samples"]),),
            since=int(history.steps("loss")[0]),
            # a bandit has one state
            severity=Severity.INFO if any(events_of(history, POLICY)) else Severity.WARNING,
        )


def find_copied_samples(history: History) -> Iterator[Sign]:
    """Yield a sign if the samples of each batch are all the same, while the batches differ."""
    for event in events_of(history, SAMPLES_EQUAL):
        yield Sign(
            f"all {event.values['samples']:.0f} samples of a batch are the same, while the batches differ",
            (Quantity(key=COPIED, label="samples of a batch", value=event.values["samples"]),),
            since=int(history.steps("loss")[0]),
            # the actions for one state
            severity=Severity.INFO if any(events_of(history, POLICY)) else Severity.WARNING,
        )


def find_equal_labels(history: History) -> Iterator[Sign]:
    """Yield a sign if all labels that were read are one class."""
    for event in events_of(history, LABELS_EQUAL):
        evidence = Quantity(key="labels.equal", label="labels of one class", value=event.values["labels"])
        since = int(history.steps("loss")[0])
        yield Sign(f"the labels do not differ: {event.text}", (evidence,), since=since, severity=Severity.WARNING)


def _kinds(history: History) -> tuple[EventKind, ...]:
    """Return the kinds of events that count: the model may get the same inputs while the batches of the loop differ."""
    is_handed_over = not math.isnan(history.run.newest("batch_hash")[0])
    return (BATCH_ALIKE,) if is_handed_over else (BATCH_ALIKE, INPUTS_ALIKE)
