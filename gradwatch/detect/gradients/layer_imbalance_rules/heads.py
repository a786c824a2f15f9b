"""Find the output head with a gradient that dominates the other heads: the shared layers learn for it alone.

The heads are parallel output layers that send their gradients into shared layers. They are compared in the first steps
only: later one head may have converged, so that its gradient is gone. Heads that train in turn never meet, and do not
count.
"""

# T = steps of a window, H = heads

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gradwatch.detect.features.events import events_of
from gradwatch.detect.features.finding import Sign, format_factor
from gradwatch.detect.features.robust_stats import log10, median
from gradwatch.detect.features.scope import module_of
from gradwatch.detect.features.structure import structure_of
from gradwatch.events import HEADS
from gradwatch.history.store import History
from gradwatch.records import Quantity, Severity


def find_dominant_heads(history: History, *, decades: float, steps: int, head_steps: int) -> Iterator[Sign]:
    """Yield a sign for the head of each model that dominates the other heads.

    Args:
        history: History of the run.
        decades: Minimum lead over the second largest head, in powers of ten.
        steps: Newest steps over which the smallest lead counts.
        head_steps: Number of first steps in which heads are compared.
    """
    if history.step >= head_steps:
        return
    for event in events_of(history, HEADS):
        heads_H = np.array(list(event.values.values()), np.intp)
        l2_TL = history.param.window("grad.l2", steps)
        log_TH = log10(l2_TL[:, heads_H] / structure_of(history).rms_scale_L[heads_H])
        if len(log_TH) < steps or np.isnan(log_TH).any():  # heads that train in turn never meet
            continue
        top = int(np.argmax(median(log_TH)))
        lead = float((log_TH[:, top] - np.delete(log_TH, top, axis=1).max(axis=1)).min())
        if lead < decades:
            continue
        layer = module_of(history, int(heads_H[top]))
        yield Sign(
            f"the gradient of {layer} is at least {format_factor(10**lead)} times the gradient of any other head: "
            "the shared layers learn for this head only",
            (
                Quantity(
                    key="imbalance.lead_over_second_head_decades",
                    label="gradient / second largest head, at least",
                    value=lead,
                    unit="orders of magnitude",
                ),
                Quantity(key="grad.element", label="gradient element", value=float(10 ** log_TH[-1, top])),
            ),
            layer=layer,
            severity=Severity.WARNING,
        )
