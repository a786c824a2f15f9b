"""Hold a map with its evidence and its verdict, as text and as plain data."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor

from gradwatch.attribution.drawing import bars, overlay
from gradwatch.attribution.evidence import Evidence
from gradwatch.attribution.judge import MapVerdict, Reason
from gradwatch.attribution.methods import Method
from gradwatch.attribution.score import Kind, Target
from gradwatch.records import plain, plain_fields

HEADLINES = {
    "holds": "the map holds",
    "misleads": "the map misleads",
    "cannot tell": "cannot tell whether the map holds",
}
NAMES: dict[Method, str] = {
    "saliency": "saliency",
    "smoothgrad": "SmoothGrad",
    "integrated": "integrated gradients",
    "occlusion": "occlusion",
    "gradcam": "Grad-CAM",
}


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Attribution:
    """What `gradwatch.attribute` returns. Its text is the table that `gradwatch attribute` prints.

    Args:
        method: Method of the map.
        target: Index of the explained output.
        kind: `values`, `image` or `tokens`.
        is_signed: Whether negative values lower the score; saliency and SmoothGrad have no sign.
        verdict: `holds`, `misleads` or `cannot tell`.
        reasons: Reasons against the map, proofs first.
        evidence: Measurements of the experiments.
        evaluations: Steps of integrated gradients or samples of SmoothGrad; 0 for other methods.
        standard_error: Mean standard error of SmoothGrad over its mean magnitude; nan for other methods.
        values: The map, shape of the sample; for tokens, shape of their embeddings.
        contributions: Share of each input in the change of the score from the baseline; None for Grad-CAM.
        totals: The map summed for each value, pixel or token.
        inputs: The sample.
        names: Names of the features, such as columns or the texts of tokens; empty if there are none.
    """

    method: Method
    target: Target
    kind: Kind
    is_signed: bool
    verdict: MapVerdict
    reasons: tuple[Reason, ...]
    evidence: Evidence
    evaluations: int
    standard_error: float
    values: Tensor
    contributions: Tensor | None
    totals: tuple[float, ...]
    inputs: Tensor
    names: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return plain_fields(self.evidence) | {
            "method": self.method,
            "target": [*self.target] if isinstance(self.target, tuple) else self.target,
            "verdict": self.verdict,
            "reasons": [reason._asdict() for reason in self.reasons],
            "evaluations": self.evaluations,
            "standard_error": plain(self.standard_error),
            "kind": self.kind,
            "shape": [*self.inputs.shape[1:]],
            "map": [*self.totals],
            "names": [*self.names] or None,
        }

    def __str__(self) -> str:
        return "\n".join([self.headline, *self.picture(), *self.rows(), *(f"  why: {r.text}" for r in self.reasons)])

    @property
    def headline(self) -> str:
        """Return the verdict in one line."""
        target = "" if self.target is None else f" for output {self.target}"
        return f"{HEADLINES[self.verdict]}: {NAMES[self.method]}{target}"

    def picture(self) -> list[str]:
        """Return the map as lines of text: an image as a coarse overlay, other features as bars."""
        if self.kind == "image":
            return overlay(self.totals, self.inputs.shape[-2:], is_signed=self.is_signed)
        if self.kind == "tokens":
            texts = map(repr, self.names) if self.names else self.features
            return bars(self.totals, names=[f"{i}: {text}" for i, text in enumerate(texts)])
        return bars(self.totals, names=self.features)

    @property
    def features(self) -> list[str]:
        """Return a name for each value of the map: as given, or its number, for tokens `token 5`."""
        if self.names:
            return [*self.names]
        if self.kind == "tokens":
            return [f"token {number}" for number in self.inputs[0].tolist()]
        return [str(i) for i in range(len(self.totals))]

    def rows(self) -> list[str]:
        """Return one line for each experiment."""
        return [f"  {name:<13} {text}" for name, text in self.experiments()]

    def experiments(self) -> Iterator[tuple[str, str]]:
        """Yield each experiment with its result in words."""
        e = self.evidence
        first = next(iter(e.baseline_scores))
        yield "score", f"{e.score:.4g}; {e.baseline_scores[first]:.4g} at the baseline '{first}'"
        if math.isfinite(e.gap):
            work = f" after {self.evaluations} steps" if self.method == "integrated" else ""
            yield "completeness", f"gap {e.gap:.2%}{work}; {e.activity:.0%} of the largest integrated gradients"
        if math.isfinite(self.standard_error):
            yield "samples", f"{self.evaluations} noisy gradients, standard error {self.standard_error:.1%}"
        if math.isfinite(e.mean_agreement):
            each = ", ".join(f"{name} {value:.2f}" for name, value in e.agreement.items() if math.isfinite(value))
            yield "baselines", f"rank correlation with integrated gradients from {each}"
        if math.isfinite(e.stability.mean):
            error = f"{e.stability.mean:.2f} +- {e.stability.standard_error:.2f}"
            yield "stability", f"rank correlation {error} under small noise"
        if e.deletion:
            yield (
                "deletion",
                f"area {e.deletion.area:+.3f} +- {e.deletion.standard_error:.3f} against random orders; "
                f"{e.deletion.better_orders:.0%} of them are better",
            )
        yield "interaction", f"{e.interaction:.0%} between two of the top features"
