"""Measure a model on its validation data, without changing its mode or the random generators."""

# R = ranks, B = batches, K = numbers that the ranks exchange

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gradwatch.config.contradictions import needs_validation
from gradwatch.config.sections.root import Config
from gradwatch.errors import GradwatchError
from gradwatch.probe.device.sync import to_float
from gradwatch.records import DataInfo
from gradwatch.train.batches import Batches
from gradwatch.train.objective import predictions_right
from gradwatch.train.parallel.parts import StandIn
from gradwatch.train.parallel.ranks import Ranks
from gradwatch.train.step import Stepper, to_device
from gradwatch.train.streams.batches import StreamBatches


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """A validation result: the mean loss over all targets, and the fraction of correct labels (nan if none)."""

    loss: float
    accuracy: float


def check_metrics(config: Config, data: DataInfo) -> None:
    """Raise a GradwatchError if the config asks for a validation metric that these data do not have.

    Args:
        config: The run's config. `config.contradictions` has found the cases that need no data.
        data: Size and kind of the data.
    """
    stop = config.train.early_stop
    if data.held_out == 0:
        samples = "the stream" if data.samples is None else f"the {data.samples:,} samples"
        for key, is_asked in needs_validation(config).items():
            if is_asked:
                raise GradwatchError(
                    f"{key}: needs a validation part, but none of {samples} of {data.name} is held "
                    "out; set data.val_fraction, or remove the setting"
                )
    elif stop and stop.metric == "val_accuracy" and data.kind == "values":
        raise GradwatchError(
            f"train.early_stop.metric: val_accuracy is not measured on values, which {data.name} has"
            f"{f' (guessed from {data.guess})' if data.guess else ''}; expected val_loss, or data with classes"
        )


@torch.no_grad()
def evaluate(stepper: Stepper, batches: Batches | StreamBatches) -> Evaluation:
    """Return loss and accuracy over one pass through the data, in evaluation mode."""
    was_training = stepper.model.training
    stepper.model.eval()
    try:
        return _evaluate_on_ranks(stepper, batches, stepper.ranks) if stepper.ranks else _evaluate(stepper, batches)
    finally:
        stepper.model.train(was_training)


def _evaluate(stepper: Stepper, batches: Batches | StreamBatches) -> Evaluation:
    total = counted = 0.0
    right = labels = 0
    for inputs, targets in batches.epoch(0):  # the same epoch each time: random transforms repeat, results compare
        count = stepper.objective.count(targets)
        if not count:
            continue  # every target is ignored, so the mean would be 0 / 0
        inputs, targets = to_device((inputs, targets), stepper.device)
        outputs, loss = stepper.forward(inputs, targets)
        total += count * to_float(loss)  # weighted: batches may differ in size and in ignored targets
        counted += count
        if hits := predictions_right(outputs, targets):
            right, labels = right + hits[0], labels + hits[1]
    return Evaluation(
        loss=total / counted if counted else math.nan,
        accuracy=right / labels if labels else math.nan,
    )


def _evaluate_on_ranks(stepper: Stepper, batches: Batches | StreamBatches, ranks: Ranks) -> Evaluation:
    """Return the evaluation of all ranks: losses and counts are added up, batch by batch as in one process."""
    counts: list[float] = []
    losses: list[float] = []
    right = labels = 0
    for batch in batches.epoch(0) if isinstance(batches, Batches) else _in_step(batches, ranks):
        inputs, targets = to_device(tuple(batch), stepper.device)
        # every rank runs every pass: the parameters may be sharded
        outputs, loss = stepper.forward(inputs, targets)
        count = 0.0 if isinstance(batch, StandIn) else stepper.objective.count(targets)
        counts.append(count)
        losses.append(to_float(loss) if count else 0.0)  # the mean over no targets is nan
        if not isinstance(batch, StandIn) and (hits := predictions_right(outputs, targets)):
            right, labels = right + hits[0], labels + hits[1]
    rows_RK = np.array(ranks.gather([*counts, *losses, right, labels]))
    count_RB, loss_RB = rows_RK[:, : len(counts)], rows_RK[:, len(counts) : -2]
    if stepper.objective.is_sum:  # the loss of a batch is the sum of the losses of its parts
        count_RB, loss_RB = count_RB.sum(0), loss_RB.sum(0)
    counted, (right, labels) = float(count_RB.sum()), rows_RK[:, -2:].sum(0)
    return Evaluation(
        loss=float((count_RB * loss_RB).sum()) / counted if counted else math.nan,
        accuracy=float(right / labels) if labels else math.nan,
    )


def _in_step(batches: StreamBatches, ranks: Ranks) -> Iterator[Any]:
    """Yield the batches of a pass over a stream, with stand-ins on ranks whose part of the stream is shorter."""
    batch, remaining = None, batches.epoch(0)
    while True:
        following = next(remaining, None)
        if not ranks.any(following is not None):
            return
        batch = StandIn(batch) if following is None and batch is not None else following
        if ranks.any(batch is None):
            raise GradwatchError("data: the stream for validation has too few samples to give each rank a batch")
        yield batch
