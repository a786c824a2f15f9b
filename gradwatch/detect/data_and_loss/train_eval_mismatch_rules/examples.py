"""Examples of the detector of modes and statistics that do not fit: histories that fire, and near misses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gradwatch.detect import Example
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
    NORM_STUCK,
)
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Event


def make_examples() -> Iterator[Example]:
    """Yield histories that fire, that stay quiet, and near misses."""
    off = dict.fromkeys(("dropouts", "normalisations", "trained before", "whole model"), 1.0) | {"never measured": 0}
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
    dropping = Synthetic(steps=60).add_event(FUNCTION_ACTIVE, step=40, layer="layers.2", text="dropout", values=values)
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
    yield Example("validation inputs have another scale than training inputs", _distant(gap=5.0, inputs=raw), (None,))
    yield Example("validation inputs have another scale, without harm", _distant(gap=1.2, inputs=raw))
    yield Example("an averaged copy keeps its first statistics", _copied(spread=3.0), (None,))
    values = {"dropouts": 2.0, "calls": 16.0}
    teacher = Synthetic(steps=40).add_event(MODE_TEACHER, step=20, layer="teacher", text="drops", values=values)
    yield Example("a frozen teacher drops features", teacher.history(), ("teacher",))
    yield Example("an averaged copy keeps statistics that fit", _copied(spread=0.6))
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


def _copied(*, spread: float) -> History:
    """Return a run with a copy that is evaluated twice, with statistics off by exp(`spread`)."""
    made = Synthetic(steps=60)
    for step in (20, 40):
        made.add_event(COPY_STATISTICS, step=step, text="a copy", values={"shift": 0.2, "log of spread": spread})
    return made.history()
