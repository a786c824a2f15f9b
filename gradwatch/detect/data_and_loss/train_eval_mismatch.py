"""Find dropout or batch normalization in the wrong mode for the phase, or with wrong statistics (GW503)."""

# T = steps of a window

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from gradwatch.detect import Example
from gradwatch.detect.data_and_loss.train_eval_mismatch_rules.copies import (
    find_dropping_teachers,
    find_stale_copies,
)
from gradwatch.detect.data_and_loss.train_eval_mismatch_rules.examples import make_examples
from gradwatch.detect.features.events import events_of
from gradwatch.detect.features.finding import finding_of
from gradwatch.detect.features.robust_stats import median
from gradwatch.events import (
    ADVERSARY,
    COPY_STATISTICS,
    DRAWS_ENDED,
    FUNCTION_ACTIVE,
    INPUTS_DIFFER,
    MODE_FROZEN,
    MODE_TEACHER,
    MODE_TRAINING,
    MODE_VALIDATION,
    NORM_DISTANCE,
    NORM_HASTY,
    NORM_STUCK,
)
from gradwatch.history.store import History
from gradwatch.records import Event, Finding, Quantity, Severity

NOTED = frozenset(
    {
        MODE_TRAINING,
        FUNCTION_ACTIVE,
        DRAWS_ENDED,
        MODE_FROZEN,
        MODE_VALIDATION,
        NORM_STUCK,
        NORM_HASTY,
        NORM_DISTANCE,
        INPUTS_DIFFER,
        COPY_STATISTICS,
        MODE_TEACHER,
    }
)
"""Kinds of events that can lead to a finding."""

LOSS_STEPS = 16
"""Steps of the median training loss to compare a validation loss with, free of the noise of single batches."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainEvalMismatch:
    """Dropout or batch normalization in the wrong mode, or with the wrong statistics.

    What it measures: the mode of dropout and batch normalization in training and validation, and how well running
    statistics fit the data.

    Why it matters: training in evaluation mode overfits or drifts; validation in training mode is noisy and changes the
    statistics. With wrong statistics a good model fails outside of training.

    Example: `model.eval()` before a validation, and no `model.train()` after it.

    What to do: call model.train() before each training pass and model.eval() before each validation. PyTorch's momentum
    is 1 minus TensorFlow's. For small or mixed batches use GroupNorm or LayerNorm.

    When it is wrong: frozen or pretrained parts, and MC dropout, are reported as info or not at all. Not seen: the mode
    of an averaged copy of the model, compiled models.

    How it is detected: (1) A dropout or batch normalization is in evaluation mode while the optimizer updates the
    weights around it. This is info if it was so from the start and the running statistics were measured before, except
    for the dropout of a whole model. It is also info if only normalizations are, in a module in training mode or with a
    frozen scale. But dropout gives a warning once validation is `worse`. (2) The forward calls of a validation loss are
    in training mode, not counting dropout alone; or so are several calls without gradients between two steps, or after
    the last, when there were none at earlier steps. Without a validation loss, a generator and its critic are left out
    (info). (3) Functions apply dropout in evaluation mode at the second validation: `F.dropout(x)` does unless it gets
    `training=self.training`. This is info if the same inputs are evaluated again.
    (4) A batch normalization has a momentum of 0 or nearly 1. (5) The mean or deviation of all validation inputs
    differs by `shift` or `spread` from the first training step, and validation is `worse`. (6) Running
    statistics differ as much from the statistics of the next batch at `far` validations. (7) A module drew random
    numbers in each sampled step until the first validation loss, and none in 3 sampled steps after it: its evaluation
    has changed its rate for good. This is not seen without a validation loss.
    (8) A copy of the model that no optimizer moves, and whose weights follow it, is called in evaluation mode. Its
    running statistics are those of its first step and differ by `shift` or `spread` from the model's, at `far` looks.
    (9) A frozen module has active dropout, and each of its calls is without gradients, with the tensor that a trained
    module gets too and with outputs of equal shape, as in distillation.

    Exceptions to the rules: freezing is not a mistake, so pretrained parts and normalizations with frozen statistics
    are reported as info, whether or not their scale is tuned. Statistics that are 0 and 1 as at the start normalize
    nothing, so freezing these gives a warning. Dropout that is active in evaluation on purpose (MC dropout) is reported
    as info or not at all. An average often gets its statistics at the end, and the target of a contrastive loss
    normalizes by batches: a copy counts only if it is called in evaluation mode. A teacher whose weights move, or that
    is called several times with one tensor, is noisy on purpose. Functions in compiled models or models
    with torch's own attention are not seen.

    Source: Ioffe & Szegedy 2015, sec. 3.1, https://arxiv.org/abs/1502.03167; Wu & Johnson 2021, "Rethinking Batch in
    BatchNorm", sec. 3 and 4, https://arxiv.org/abs/2105.07576.

    Args:
        every: Steps between two calls. 5: the modes of single modules are read every 8 updates.
        shift: Distance of running and batch mean, in standard deviations of the batch, in half of the channels. 1: the
            noise of the mean over 16 values is 0.25.
        spread: Ratio of running and batch variance in half of the channels. 4: twice the standard deviation; the noise
            over 16 values is a factor of 1.4.
        worse: Validation loss, in units of the training loss, from which wrong statistics do harm. 2: the usual gap
            between training and validation is smaller; a larger one without wrong statistics may be overfitting.
        far: Validations with wrong running statistics that (6) needs, and looks that (8) needs. 2: the first may come
            before they have settled.
    """

    code: ClassVar[str] = "GW503"
    kind: ClassVar[str] = "train-eval-mismatch"
    runs_at_end: ClassVar[bool] = True
    every: int = 5
    shift: float = 1.0
    spread: float = 4.0
    worse: float = 2.0
    far: int = 2

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding for each wrong mode and for wrong statistics."""
        # cheap: most runs have no such event
        if not any(event.kind in {kind.name for kind in NOTED} for event in history.events):
            return
        ratio = _validation_over_training(history)
        for event in events_of(history, MODE_TRAINING):
            severity = _severity(event, is_harmful=ratio >= self.worse)
            is_chosen = severity is Severity.INFO and not event.values["dropouts"]
            text = f"{event.text}: fine if the statistics are frozen on purpose" if is_chosen else event.text
            yield self._finding(history, event, severity, text)
        for event in events_of(history, FUNCTION_ACTIVE):
            # several evaluations of the same inputs sample the dropout on purpose
            is_sampling = event.values["evaluations of the same inputs"] > 0
            severity = Severity.INFO if is_sampling else Severity.WARNING
            yield self._finding(history, event, severity, f"{event.text} (in {event.layer or 'the model'})")
        for event in events_of(history, DRAWS_ENDED):
            yield self._finding(history, event, Severity.WARNING, event.text)
        for event in events_of(history, MODE_FROZEN):
            yield self._finding(history, event, Severity.INFO, f"{event.text}: fine if frozen on purpose")
        for event in events_of(history, MODE_VALIDATION):
            # a generator may show its samples in training mode
            is_game = "+" in history.info.optimizer or any(events_of(history, ADVERSARY))
            severity = Severity.INFO if is_game and math.isnan(ratio) else Severity.WARNING
            yield self._finding(history, event, severity, event.text)
        for event in (*events_of(history, NORM_STUCK), *events_of(history, NORM_HASTY)):
            yield self._finding(history, event, Severity.WARNING, f"{event.text} (in {event.layer})")
        for event in events_of(history, INPUTS_DIFFER):
            # a model may bear other inputs
            if self._is_far(event) and ratio >= self.worse:
                yield self._finding(history, event, Severity.WARNING, event.text, ratio=ratio)
        far = [event for event in events_of(history, NORM_DISTANCE) if self._is_far(event)]
        if len(far) >= self.far and ratio >= self.worse:
            text = f"the running statistics of {far[-1].layer} do not fit the batches"
            yield self._finding(history, far[-1], Severity.WARNING, text, ratio=ratio)
        yield from find_stale_copies(self, history, shift=self.shift, spread=self.spread, far=self.far)
        yield from find_dropping_teachers(self, history)

    def _is_far(self, event: Event) -> bool:
        return event.values["shift"] >= self.shift or event.values["log of spread"] >= math.log(self.spread)

    def _finding(
        self, history: History, event: Event, severity: Severity, message: str, *, ratio: float | None = None
    ) -> Finding:
        evidence = [
            Quantity(key=name, label="normalizations" if name == "normalisations" else "", value=value)
            for name, value in event.values.items()
        ]
        if ratio is not None:
            evidence.append(Quantity(key="val_loss.by_loss", label="validation loss / training loss", value=ratio))
        return finding_of(self, history, message, *evidence, layer=event.layer, severity=severity, onset=event.step)

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, that stay quiet, and near misses."""
        yield from make_examples()


def _severity(event: Event, *, is_harmful: bool) -> Severity:
    """Return info for pretrained layers in eval mode from the start, unless missing dropout does harm."""
    values = event.values
    is_pretrained = not (values["never measured"] or values["trained before"])
    lacks_dropout = values["dropouts"] and (is_harmful or values["whole model"])
    return Severity.INFO if is_pretrained and not lacks_dropout else Severity.WARNING


def _validation_over_training(history: History) -> float:
    """Return the newest validation loss over the training loss before it, or nan without one."""
    val_T, loss_T = history.scalar("val_loss"), history.scalar("loss")
    measured = np.flatnonzero(np.isfinite(val_T))
    if not len(measured):
        return math.nan
    end = int(measured[-1]) + 1
    # only losses up to the validation: later updates may have changed the model
    usual = float(median(loss_T[max(0, end - LOSS_STEPS) : end]))
    return float(val_T[end - 1]) / usual if usual > 0 else math.nan
