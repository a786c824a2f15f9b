"""Find hidden layers with a softmax activation, which makes gradients vanish within two layers.

The slope p (1 - p) of a softmax is about 1 / units, so each such layer divides gradients by its number of units. The
output layer counts here.
"""

from __future__ import annotations

import numpy as np

from gradwatch.detect.features.events import events_of
from gradwatch.detect.features.finding import Sign, format_fold
from gradwatch.detect.features.robust_stats import median
from gradwatch.detect.features.scope import module_of
from gradwatch.detect.features.structure import structure_of
from gradwatch.detect.gradients.vanishing_gradient_rules.stuck import MEDIAN_STEPS, is_stuck, severity_of_fall
from gradwatch.events import HIDDEN_SOFTMAX
from gradwatch.history.store import History
from gradwatch.records import Quantity


def find_hidden_softmax(history: History, *, kind: str, decades: float, at_once: float) -> Sign | None:
    """Return a sign for the first layer with a softmax activation, if gradients vanish through it.

    Args:
        history: History of the run.
        kind: Kind of the resulting finding; an earlier finding of this kind suffices.
        decades: Fall in powers of ten that counts if the loss is stuck.
        at_once: Fall that counts without waiting for the loss.
    """
    softmax = list(events_of(history, HIDDEN_SOFTMAX))
    if not softmax or any(f.kind == kind for f in history.findings):
        return None
    l2_TL = history.param.window("grad.l2", MEDIAN_STEPS)
    if len(l2_TL) < MEDIAN_STEPS:
        return None
    # several softmax layers count as one fall, from before the first to behind the last
    first = min(int(event.values["before"]) for event in softmax)
    last = max(int(event.values["behind"]) for event in softmax)
    size = median(l2_TL)[[first, last]] / structure_of(history).rms_scale_L[[first, last]]
    if not 0 < size[0] < size[1] < np.inf:  # also nan
        return None
    fall = float(np.log10(size[1] / size[0]))
    if fall < decades or (fall < at_once and not is_stuck(history)):
        return None
    layer = module_of(history, first)
    return Sign(
        f"gradients shrink {format_fold(fall)} from the output to {layer}, through a hidden softmax",
        (
            Quantity(key="depth.fall_decades", label="shrinkage over depth", value=fall, unit="orders of magnitude"),
            Quantity(key="softmax.hidden_layers", label="hidden layers with a softmax", value=float(len(softmax))),
            Quantity(key="grad.element.first", label="gradient element before the first", value=float(size[0])),
            Quantity(key="grad.element.last", label="gradient element after the last", value=float(size[1])),
        ),
        layer=layer,
        severity=severity_of_fall(fall),
    )
