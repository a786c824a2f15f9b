"""Find dropout or batch normalization in the wrong mode for the phase, or with wrong statistics (GW503)."""

# T = steps of a window

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from gradwatch.detect import Example
from gradwatch.detect.features.events import events_of
from gradwatch.detect.features.finding import finding_of
from gradwatch.detect.features.robust_stats import median
from gradwatch.events import (
    ADVERSARY,
    DRAWS_ENDED,
    FUNCTION_ACTIVE,
    INPUTS_DIFFER,
    MODE_FROZEN,
    MODE_TRAINING,
    MODE_VALIDATION,
    NORM_DISTANCE,
    NORM_HASTY,
    NORM_STUCK,
)
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
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

    When it is wrong: frozen or pretrained parts, and MC dropout, are reported as info or not at all. Not seen: an
    averaged copy of the model, compiled models.

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

    Exceptions to the rules: freezing is not a mistake, so pretrained parts and normalizations with frozen statistics
    are reported as info, whether or not their scale is tuned. Statistics that are 0 and 1 as at the start normalize
    nothing, so freezing these gives a warning. Dropout that is active in evaluation on purpose (MC dropout) is reported
    as info or not at all. The evaluation of another object (an averaged copy) is not seen, nor are functions in
    compiled models or models with torch's own attention.

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
        far: Validations with wrong running statistics that (6) needs. 2: the first may come before they have settled.
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
        off = dict.fromkeys(("dropouts", "normalisations", "trained before", "whole model"), 1.0) | {
            "never measured": 0
        }
        forgotten = Synthetic(steps=60).add_event(MODE_TRAINING, step=33, text="1 dropout is off", values=off)
        yield Example("the model stays in evaluation mode after a validation", forgotten.history(), (None,))
        encoder = {"dropouts": 1.0} | dict.fromkeys(
            ("normalisations", "trained before", "whole model", "never measured"), 0.0
        )
        overfits = _distant(spread=0.4, gap=3.0)
        overfits.add_event(
            Event(kind=MODE_TRAINING.name, step=7, layer="layers.2", text="1 dropout is off", values=encoder)
        )
        yield Example("an encoder overfits, and its dropout is off", overfits, ("layers.2",))
        values = {"evaluations of the same inputs": 0.0}
        dropping = Synthetic(steps=60).add_event(
            FUNCTION_ACTIVE, step=40, layer="layers.2", text="dropout", values=values
        )
        yield Example("a function drops in evaluation", dropping.history(), ("layers.2",))
        ended = Synthetic(steps=60).add_event(
            DRAWS_ENDED, step=40, layer="layers.2", text="draws ended", values={"drawing modules": 1.0}
        )
        yield Example("an evaluation sets a rate to 0 for good", ended.history(), ("layers.2",))
        noisy = Synthetic(steps=60).add_event(
            MODE_VALIDATION, step=40, text="measured in training mode", values={"calls": 1.0}
        )
        yield Example("validation in training mode", noisy.history(), (None,))
        shown = Synthetic(steps=60).add_event(ADVERSARY)
        shown.add_event(MODE_VALIDATION, step=40, text="evaluated in training mode", values={"calls": 8.0})
        yield Example("a generator shows samples in training mode: for information", shown.history(), (None,))
        stuck = Synthetic(steps=40).add_event(NORM_STUCK, layer="layers.2", text="momentum 0", values={"momentum": 0.0})
        yield Example("statistics that never move", stuck.history(), ("layers.2",))
        yield Example("statistics that lag behind", _distant(spread=3.0, gap=5.0), ("layers.2",))
        raw = {"shift": 0.8, "log of spread": 5.5}
        yield Example(
            "validation inputs have another scale than training inputs", _distant(gap=5.0, inputs=raw), (None,)
        )
        yield Example("validation inputs have another scale, without harm", _distant(gap=1.2, inputs=raw))
        yield Example("a healthy run", Synthetic(steps=40).history())
        pretrained = Synthetic(steps=40).add_event(
            MODE_FROZEN, layer="layers.2", text="1 normalization is off", values={"normalisations": 1.0}
        )
        yield Example("normalizations frozen on purpose are for information", pretrained.history(), ("layers.2",))
        tuned = {"normalisations": 2.0, "whole model": 1.0} | dict.fromkeys(
            ("dropouts", "never measured", "trained before"), 0.0
        )
        scaled = Synthetic(steps=40).add_event(MODE_TRAINING, text="2 normalizations are off", values=tuned)
        yield Example("pretrained statistics stay, and scales are tuned: for information", scaled.history(), (None,))
        yield Example("statistics that lag behind, without harm", _distant(spread=3.0, gap=1.2))
        yield Example("a large gap, and correct statistics", _distant(spread=0.4, gap=5.0))
        once = _distant(spread=3.0, gap=5.0, times=1)
        yield Example("statistics that lag behind once, at the start", once)


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


def _distant(*, gap: float, spread: float = 0.0, times: int = 2, inputs: Mapping[str, float] | None = None) -> History:
    """Return a run with a validation loss of `gap` training losses and statistics off by exp(`spread`)."""
    made = Synthetic(steps=100)
    for step in (39, 79)[:times]:
        made.val_loss_T[step] = gap * made.loss_T[step]
        made.add_event(
            NORM_DISTANCE, step=step + 1, layer="layers.2", text="far", values={"shift": 0.2, "log of spread": spread}
        )
    if inputs:
        made.add_event(INPUTS_DIFFER, step=40, text="of another scale", values=inputs)
    return made.history()
