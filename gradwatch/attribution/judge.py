"""Decide from the evidence whether a map holds or misleads."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from gradwatch.attribution.evidence import Evidence
from gradwatch.attribution.methods import Method
from gradwatch.attribution.thresholds import Thresholds

MapVerdict = Literal["holds", "misleads", "cannot tell"]
ReasonKind = Literal[
    "constant", "saturation", "incomplete", "interaction", "baselines", "unstable", "random", "within-random"
]


class Reason(NamedTuple):
    """A reason why a map does not hold.

    Attributes:
        kind: Kind of the problem.
        text: One sentence for people.
        is_proof: Whether it shows that the map misleads; otherwise it only leaves doubt.
    """

    kind: ReasonKind
    text: str
    is_proof: bool


def judge(evidence: Evidence, method: Method, limits: Thresholds) -> tuple[MapVerdict, tuple[Reason, ...]]:
    """Return the verdict on a map, and the reasons against it."""
    if not any(evidence.sizes.values()):
        text = "the gradient is zero along the path from every baseline: the score does not depend on this sample"
        return "cannot tell", (Reason("constant", text, False),)
    reasons = [
        *_saturation(evidence, limits),
        *_completeness(evidence, method, limits),
        *_deletion(evidence, limits),
        *_stability(evidence, limits),
        *_baselines(evidence, limits),
    ]
    if evidence.interaction > limits.interaction:
        text = (
            f"interactions: two of the top features change the score together by {evidence.interaction:.0%} more or "
            "less than apart, so no number per feature is right"
        )
        reasons.append(Reason("interaction", text, False))
    reasons.sort(key=lambda reason: not reason.is_proof)
    if not reasons:
        return "holds", ()
    return ("misleads" if reasons[0].is_proof else "cannot tell"), tuple(reasons)


def _saturation(evidence: Evidence, limits: Thresholds) -> list[Reason]:
    if not evidence.activity < limits.activity:  # also nan, for Grad-CAM
        return []
    sees = max(evidence.sizes, key=lambda name: evidence.sizes[name])
    text = (
        "saturation: near this sample the score hardly changes; the map's magnitudes add up to "
        f"{evidence.activity:.1%} of those of integrated gradients from the baseline '{sees}'"
    )
    return [Reason("saturation", text, True)]


def _completeness(evidence: Evidence, method: Method, limits: Thresholds) -> list[Reason]:
    if method != "integrated" or evidence.gap <= limits.gap:
        return []
    name = next(iter(evidence.steps))
    text = (
        f"completeness: after {evidence.steps[name]} steps the map still misses {evidence.gap:.1%} of the change of "
        "the score; the gradient jumps along the path"
    )
    return [Reason("incomplete", text, False)]


def _deletion(evidence: Evidence, limits: Thresholds) -> list[Reason]:
    found = evidence.deletion
    if found is None or found.spread <= limits.spread:
        return []
    if found.area <= limits.deviations * found.standard_error:
        text = (
            f"deletion: removing the top features is no better than a random order ({found.area:+.3f} +- "
            f"{found.standard_error:.3f})"
        )
        return [Reason("random", text, True)]
    if found.better_orders > limits.better_orders:
        text = f"deletion: {found.better_orders:.0%} of the random orders change the score faster than the map"
        return [Reason("within-random", text, False)]
    return []


def _stability(evidence: Evidence, limits: Thresholds) -> list[Reason]:
    mean, margin = evidence.stability.mean, limits.deviations * evidence.stability.standard_error
    if math.isnan(mean) or mean - margin >= limits.stability:
        return []
    text = (
        f"instability: under noise of {limits.noise_frac:.0%} of the sample's range the map correlates with itself by "
        f"{mean:.2f} +- {evidence.stability.standard_error:.2f}"
    )
    return [Reason("unstable", text, mean + margin < limits.stability)]


def _baselines(evidence: Evidence, limits: Thresholds) -> list[Reason]:
    mean = evidence.mean_agreement
    if math.isnan(mean) or mean >= limits.agreement:
        return []
    each = ", ".join(f"{name} {value:.2f}" for name, value in evidence.agreement.items() if math.isfinite(value))
    text = f"baselines: integrated gradients from other baselines order the features differently (correlation: {each})"
    return [Reason("baselines", text, False)]
