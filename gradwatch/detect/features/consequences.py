"""Decide whether an earlier finding explains a symptom, which is then reported as info only."""

from __future__ import annotations

import functools

from gradwatch.history.store import History
from gradwatch.records import Severity

OVERSHOT = frozenset({"exploding-gradient", "learning-rate-too-high", "missing-zero-grad", "non-finite"})
"""Kinds of findings in which updates move the weights far from useful values."""

FOLLOWS: dict[str, frozenset[str]] = {
    # an update moved units to where no gradient arrives, or a detached part no longer steers them
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
    # weights that overshot are another policy
    "policy-divergence": OVERSHOT | {"gradient-spike"},
    "attention-collapse": OVERSHOT | {"gradient-spike", "poor-initialization"},
    "saturated-activation": OVERSHOT | {"gradient-spike", "poor-initialization"},
    # an exploding recurrence makes the first loss large whatever the weights are
    "poor-initialization": frozenset({"exploding-gradient"}),
    # a factor that stays zero blocks the gradient of the other factor; fp16 may flush the gradient to zero
    "no-gradient": frozenset({"fp16-underflow", "not-optimized", "poor-initialization"}),
    # gradients that accumulate over steps grow, and so do the updates
    "learning-rate-too-high": frozenset({"missing-zero-grad", "non-finite"}),
    "exploding-gradient": frozenset({"missing-zero-grad"}),
    # a collapsed loss scale no longer lifts gradients above the smallest fp16 number
    "fp16-underflow": frozenset({"loss-scale-collapse"}),
    # layers that were initialized too small make the signal vanish
    "vanishing-gradient": frozenset({"poor-initialization"}),
    # a memorized batch has almost no gradient, so any other gradient looks like a spike
    "gradient-spike": frozenset({"constant-batch", "missing-zero-grad", "exploding-gradient"}),
    # an output that jumps, or never moves, predicts one class for every batch
    "oscillating-gradient": frozenset(
        {"missing-zero-grad", "exploding-gradient", "not-optimized", "poor-initialization"}
    ),
    # weights that large lose small updates to float32 rounding
    "not-optimized": OVERSHOT,
    # one layer moved further than the others, or no optimizer holds it and so clears its gradient, or the others get
    # only the gradient of a penalty
    "layer-imbalance": OVERSHOT | {"no-gradient", "not-optimized"},
    # a missing gradient moves nothing; a usual gradient hardly moves weights that overshot; a parameter outside the
    # optimizer never moves; clipping leaves little if one layer dominates the norm
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
    # a validation in the wrong mode, or with wrong running statistics, does not measure the fit
    "overfitting": frozenset({"train-eval-mismatch"}),
    # a plateau is by definition a stall without another explanation
    "loss-plateau": OVERSHOT
    | {
        "attention-collapse",
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
        "policy-divergence",
        "probabilities-into-loss",
        "saturated-activation",
        "vanishing-gradient",
    },
}
"""For each kind of finding, the kinds that can cause it by their mechanism."""


@functools.cache
def cause_depth(kind: str) -> int:
    """Return the length of the longest chain of kinds that can lead to this one: 0 if none of them can cause it.

    Of detectors that are due at the same step, one of a lower depth runs first. So a cause is known when its
    consequence is judged.
    """
    return max((1 + cause_depth(cause) for cause in FOLLOWS.get(kind, ())), default=0)


def severity_after(history: History, kind: str, *, but: frozenset[str] = frozenset()) -> Severity:
    """Return the severity that earlier findings leave: warning, or info if one of them explains this kind.

    Args:
        history: History of the run.
        kind: Kind of the finding.
        but: Kinds that do not explain it in this case.
    """
    return Severity.INFO if is_consequence(history, kind, but=but) else Severity.WARNING


def is_consequence(history: History, kind: str, *, but: frozenset[str] = frozenset()) -> bool:
    """Return whether an earlier finding, at warning or above, explains this kind of finding."""
    roots = FOLLOWS[kind] - but
    # a finding at info is harmless, so it explains nothing
    return any(finding.kind in roots and finding.severity >= Severity.WARNING for finding in history.findings)
