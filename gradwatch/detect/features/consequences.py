"""What follows from what: a symptom that an earlier finding explains is told, but it is no illness of its own."""

from __future__ import annotations

from gradwatch.history.store import History
from gradwatch.records import Severity

OVERSHOT = frozenset({"exploding-gradient", "learning-rate-too-high", "missing-zero-grad", "non-finite"})
"""Updates that throw the weights far off."""

FOLLOWS: dict[str, frozenset[str]] = {
    # units and layers that were thrown to where no gradient is, or that a cut or a swamped part no longer steers
    "rising-sparsity": OVERSHOT
    | {"dead-layer", "dead-relu", "gradient-spike", "layer-imbalance", "no-gradient", "poor-initialization"},
    # where signals vanish, biases alone say which units fire
    "dead-relu": OVERSHOT | {"vanishing-gradient"},
    "dead-layer": OVERSHOT
    | {
        "dead-relu",
        "fp16-underflow",
        "no-gradient",
        "poor-initialization",
        "saturated-activation",
        "vanishing-gradient",
    },
    "saturated-activation": OVERSHOT | {"gradient-spike", "poor-initialization"},
    # a first loss in the thousands is what a recurrence that explodes computes with any weights
    "poor-initialization": frozenset({"exploding-gradient"}),
    # a factor of zero that nothing moves, or all of them at zero, keep the gradient from the other; half precision
    # flushes all of it
    "no-gradient": frozenset({"fp16-underflow", "not-optimized", "poor-initialization"}),
    # sums of gradients grow, and with them all that is made of them
    "learning-rate-too-high": frozenset({"missing-zero-grad", "non-finite"}),
    "exploding-gradient": frozenset({"missing-zero-grad"}),
    # a scale that skip after skip has brought down lifts nothing over the smallest number any more
    "fp16-underflow": frozenset({"loss-scale-collapse"}),
    # layers that were drawn too small make a signal vanish
    "vanishing-gradient": frozenset({"poor-initialization"}),
    # of a batch that is known by heart the usual gradient is next to nothing
    "gradient-spike": frozenset({"constant-batch", "missing-zero-grad", "exploding-gradient"}),
    # an output that is thrown about, or that nothing moves, predicts one class too, whatever the batches hold
    "oscillating-gradient": frozenset(
        {"missing-zero-grad", "exploding-gradient", "not-optimized", "poor-initialization"}
    ),
    # updates that float32 loses beside weights as large as that
    "not-optimized": OVERSHOT,
    # one layer was thrown further than the others, or no optimizer holds it, so that none clears its gradient
    "layer-imbalance": OVERSHOT | {"not-optimized"},
    # a gradient that does not arrive moves nothing, nor does a usual one weights that were thrown far off, nor any what
    # no optimizer holds; and little does what one layer leaves of a clipping
    "learning-rate-too-low": OVERSHOT
    | frozenset(
        {
            "dead-relu",
            "fp16-underflow",
            "layer-imbalance",
            "loss-scale-collapse",
            "no-gradient",
            "not-optimized",
            "poor-initialization",
            "saturated-activation",
            "vanishing-gradient",
        }
    ),
    # a validation in the wrong mode, or by statistics of other batches, does not tell how well the model fits
    "overfitting": frozenset({"train-eval-mismatch"}),
    # by its definition what nothing else explains
    "loss-plateau": OVERSHOT
    | {
        "dead-layer",
        "dead-relu",
        "fp16-underflow",
        "gradient-spike",
        "layer-imbalance",
        "learning-rate-too-low",
        "loss-scale-collapse",
        "no-gradient",
        "not-optimized",
        "oscillating-gradient",
        "poor-initialization",
        "probabilities-into-loss",
        "saturated-activation",
        "vanishing-gradient",
    },
}
"""Kinds of findings, and those of which they are a consequence by their mechanism."""


def settled(history: History, kind: str, *, but: frozenset[str] = frozenset()) -> Severity:
    """Return the severity of a finding as far as it stands by itself: a warning, or info where another explains it.

    Args:
        history: Of the run.
        kind: Kind of the finding.
        but: Kinds that do not explain it this time.
    """
    return Severity.INFO if is_explained(history, kind, but=but) else Severity.WARNING


def is_explained(history: History, kind: str, *, but: frozenset[str] = frozenset()) -> bool:
    """Say whether a kind of finding is a consequence of one that was found before, at warning or above."""
    roots = FOLLOWS[kind] - but
    return any(finding.kind in roots and finding.severity >= Severity.WARNING for finding in history.findings)
