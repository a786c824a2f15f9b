"""Find gradients that vanish on their way from the padding of a sequence, which a model reads, back to its tokens.

A recurrent layer whose last output is taken at the end of a padded sequence has forgotten the tokens by then. Layers
can learn to carry them over a few positions. So it is a fault at once only beyond some orders of magnitude, and
otherwise once a plateau of the loss was found.
"""

from __future__ import annotations

from collections.abc import Iterator

from gradwatch.detect.features.events import events_of
from gradwatch.detect.features.finding import Sign, format_fold
from gradwatch.detect.features.recovery import fall_of_loss
from gradwatch.detect.gradients.vanishing_gradient_rules.recurrence import has_plateau
from gradwatch.events import PADDING_READ
from gradwatch.history.store import History
from gradwatch.records import Quantity, Severity

PADDING = "padding.fall_decades"
"""Key of the evidence for this mechanism."""


def find_fall_from_padding(history: History, *, at_once: float, learned: float) -> Iterator[Sign]:
    """Yield a sign for each layer that reads padding.

    Args:
        history: History of the run.
        at_once: Fall of the gradient from padding to tokens, in powers of ten, at which not to wait for a plateau.
        learned: Fall of the loss, as a fraction, after which what is left of the tokens is enough.
    """
    for event in events_of(history, PADDING_READ):
        fall = event.values["decades"]
        # here even a plateau of weights that have hardly moved has a reason
        is_stuck = has_plateau(history, least=Severity.INFO)
        if fall_of_loss(history, fall=learned) is not None or not (is_stuck or fall >= at_once):
            continue
        yield Sign(
            f"gradients shrink {format_fold(fall)} from the padding to the tokens of a sequence: what is used of "
            f"{event.layer or 'its output'} is the padding",
            (
                Quantity(key=PADDING, label="fall from padding to tokens", value=fall, unit="orders of magnitude"),
                Quantity(key="padding.fraction", label="padding", value=event.values["padding"], unit="of the tokens"),
            ),
            since=event.step,
            layer=event.layer,
            severity=Severity.WARNING,
        )
