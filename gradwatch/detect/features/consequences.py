"""Decide whether an earlier finding explains a symptom: then the symptom is reported for information only."""

from __future__ import annotations

from gradwatch.history.store import History
from gradwatch.records import Severity

OVERSHOT = frozenset({"exploding-gradient", "learning-rate-too-high", "missing-zero-grad", "non-finite"})
"""Kinds of findings whose updates move the weights far away from where they should be."""

FOLLOWS: dict[str, frozenset[str]] = {
    # units and layers that an update moved to where no gradient arrives, or that a cut part no longer steers
    "rising-sparsity": OVERSHOT
    | {"dead-layer", "dead-relu", "gradient-spike", "layer-imbalance", "no-gradient", "poor-initialization"},
    # if signals vanish, the biases alone decide which units fire
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
    # an exploding recurrence computes a first loss in the thousands with any weights
    "poor-initialization": frozenset({"exploding-gradient"}),
    # a factor of zero that nothing moves, or factors that are all zero, keep the gradient from the other factor; half
    # precision may flush all of it to zero
    "no-gradient": frozenset({"fp16-underflow", "not-optimized", "poor-initialization"}),
    # gradients that add up from step to step grow, and updates with them
    "learning-rate-too-high": frozenset({"missing-zero-grad", "non-finite"}),
    "exploding-gradient": frozenset({"missing-zero-grad"}),
    # a loss scale that collapsed no longer lifts gradients over the smallest number of fp16
    "fp16-underflow": frozenset({"loss-scale-collapse"}),
    # layers that were initialised too small make a signal vanish
    "vanishing-gradient": frozenset({"poor-initialization"}),
    # the usual gradient of a memorised batch is next to nothing
    "gradient-spike": frozenset({"constant-batch", "missing-zero-grad", "exploding-gradient"}),
    # an output that jumps about, or that nothing moves, predicts one class whatever the batches hold
    "oscillating-gradient": frozenset(
        {"missing-zero-grad", "exploding-gradient", "not-optimized", "poor-initialization"}
    ),
    # float32 loses an update next to weights that large
    "not-optimized": OVERSHOT,
    # one layer moved further than the others, or no optimizer holds it, so that nothing clears its gradient
    "layer-imbalance": OVERSHOT | {"not-optimized"},
    # a gradient that does not arrive moves nothing; a usual gradient hardly moves weights that overshot; nothing moves
    # a parameter that no optimizer holds; and clipping leaves little if one layer dominates the norm
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
    # a validation in the wrong mode, or with statistics of other batches, does not measure how well the model fits
    "overfitting": frozenset({"train-eval-mismatch"}),
    # a plateau is by definition a stall that nothing else explains
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
"""For each kind of finding, the kinds that cause it by their mechanism."""


def severity_after(history: History, kind: str, *, but: frozenset[str] = frozenset()) -> Severity:
    """Return the severity that earlier findings leave: a warning, or info if one of them explains this kind.

    Args:
        history: Of the run.
        kind: Kind of the finding.
        but: Kinds that do not explain it this time.
    """
    return Severity.INFO if is_consequence(history, kind, but=but) else Severity.WARNING


def is_consequence(history: History, kind: str, *, but: frozenset[str] = frozenset()) -> bool:
    """Return whether an earlier finding, at warning or above, explains a kind of finding."""
    roots = FOLLOWS[kind] - but
    return any(finding.kind in roots and finding.severity >= Severity.WARNING for finding in history.findings)
