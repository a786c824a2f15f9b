"""Find gradients that vanish on their way from the padding of a sequence, which a model reads, to its beginning.

A recurrent layer whose last output is taken at the end of a padded sequence has forgotten the tokens by then. Layers
can learn to carry them over some positions. So it is a fault at once only beyond some orders of magnitude, and
otherwise if the loss does not fall.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from gradwatch.detect.features.events import events_of
from gradwatch.detect.features.finding import Sign, format_fold
from gradwatch.detect.features.recovery import fall_of_loss
from gradwatch.detect.gradients.vanishing_gradient_rules.recurrence import has_plateau
from gradwatch.events import PADDED_INPUT, PADDING_READ
from gradwatch.history.store import History
from gradwatch.records import Event, Quantity, Severity

PADDING = "padding.fall_decades"
"""Key of the evidence for this mechanism."""

SMALLEST = 1e-45
"""Gradient that counts for none."""


def find_fall_from_padding(
    history: History, *, at_once: float, soon: float, healing_steps: int, least: float, learned: float
) -> Iterator[Sign]:
    """Yield a sign for each layer that reads padding.

    Args:
        history: History of the run.
        at_once: Fall of the gradient from padding to tokens, in powers of ten, at which not to wait.
        soon: Fall at which to wait `healing_steps` for the loss to fall. At a smaller one, a plateau must be found.
        healing_steps: Steps after which the loss is looked at for `soon`.
        least: Smallest fall between gradients of parameters that counts, in powers of ten.
        learned: Fall of the loss, as a fraction, which shows that enough of the tokens is left.
    """
    falls = [(event, event.values["decades"]) for event in events_of(history, PADDING_READ)]
    falls += [(event, fall) for event in events_of(history, PADDED_INPUT) if (fall := _fall(history, event)) >= least]
    for event, fall in falls:
        # here even a plateau of weights that have hardly moved has a reason
        is_stuck = has_plateau(history, least=Severity.INFO)
        is_due = fall >= at_once or (fall >= soon and history.step >= healing_steps)
        if fall_of_loss(history, fall=learned) is not None or not (is_stuck or is_due):
            continue
        yield Sign(
            f"gradients shrink {format_fold(fall)} from the padding to the beginning of a sequence: the part of "
            f"{event.layer or 'the output'} that is used is the padding",
            (
                Quantity(key=PADDING, label="fall from padding", value=fall, unit="orders of magnitude"),
                Quantity(
                    key="padding.fraction", label="padding", value=event.values["padding"], unit="of the positions"
                ),
            ),
            since=event.step,
            layer=event.layer,
            severity=Severity.WARNING,
        )


def _fall(history: History, event: Event) -> float:
    """Return the fall of the gradient from zeros at the end of a sequence to the numbers before, in powers of ten.

    The gradient of an input weight is a sum of products with the input, so zeros add nothing to it, but something to
    the gradient of the bias.
    """
    places = {layer.name: i for i, layer in enumerate(history.info.layers)}
    weight, bias = (places.get(f"{event.layer}.{name}_ih_l0") for name in ("weight", "bias"))
    if weight is None or bias is None:
        return 0.0
    width = history.info.layers[weight].shape[-1]
    of_weight, of_bias = history.param.newest("grad.l2")[[weight, bias]]
    expected = of_bias * event.values["rms"] * math.sqrt(width)
    # False for nan, which stands for a missing gradient
    return math.log10(expected / max(of_weight, SMALLEST)) if expected > 0 and of_weight >= 0 else 0.0
