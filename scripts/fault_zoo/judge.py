"""Judge the findings of one run by the facts of its case.

Only findings of severity `warning` or `critical` count. A kind is right if it is `fault` or in `also`; a kind in
`tolerate` is ignored unless it is right.

A finding of a right kind more than `max(3, onset // 10)` steps before `onset` is early. The fault did not exist yet, so
the monitor guessed its name: the finding counts as a wrong kind and finds nothing. A later one still does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scripts.fault_zoo.protocol import SEVERITIES, Case, Finding

MIN_EARLY_STEPS = 3
ONSET_STEPS_PER_EARLY_STEP = 10


@dataclass(frozen=True)
class Judgement:
    """How well one run was judged by its monitor.

    Attributes:
        is_found: A right kind was reported, and not early.
        is_right_first: The most severe finding, then the earliest, is of a right kind and not early.
        steps_to_detection: Steps from the onset to the first right finding, at least 0; None if there is none.
        is_layer_named: A right finding names a layer inside or around one of the case's layers; None for cases without
            layers.
        wrong_kinds: Kinds that are not right; for a healthy script, all kinds reported.
    """

    is_found: bool
    is_right_first: bool
    steps_to_detection: int | None
    is_layer_named: bool | None
    wrong_kinds: tuple[str, ...]


def is_same_place(layer: str | None, layers: Sequence[str]) -> bool:
    """Return whether a layer equals, lies inside, or contains one of the layers.

    Names are compared at their dots: `blocks.3` matches `blocks.3.fc.weight` and `blocks`, and not `blocks.30`. The
    root module, whose name is empty, matches nothing.
    """
    if not layer:
        return False
    return any(layer == at or layer.startswith(f"{at}.") or at.startswith(f"{layer}.") for at in layers)


def are_losses_equal(a: Sequence[float], b: Sequence[float]) -> bool:
    """Return whether two sequences of losses are bit-identical. NaN equals NaN."""
    return len(a) == len(b) and all(x == y or (math.isnan(x) and math.isnan(y)) for x, y in zip(a, b, strict=True))


def judge(case: Case, findings: Sequence[Finding]) -> Judgement:
    """Judge the findings of one run."""
    right = {*case.also, *([case.fault] if case.fault else [])}
    ignored = set(case.tolerate) - right
    loud = [f for f in findings if f.severity != "info" and f.kind not in ignored]
    # stable: findings of the same severity and step stay in the order of the monitor
    ranked = sorted(loud, key=lambda f: (-SEVERITIES.index(f.severity), f.step))
    if case.fault is None:
        return Judgement(False, False, None, None, tuple(sorted({f.kind for f in loud})))
    first_step = case.onset - max(MIN_EARLY_STEPS, case.onset // ONSET_STEPS_PER_EARLY_STEP)
    hits = sorted((f for f in loud if f.kind in right and f.step >= first_step), key=lambda f: f.step)
    wrong = {f.kind for f in loud if f.kind not in right}
    early = {f"{f.kind} (early)" for f in loud if f.kind in right and f.step < first_step}
    return Judgement(
        is_found=bool(hits),
        is_right_first=bool(ranked) and ranked[0].kind in right and ranked[0].step >= first_step,
        steps_to_detection=max(0, hits[0].step - case.onset) if hits else None,
        is_layer_named=any(is_same_place(f.layer, case.layers) for f in hits) if case.layers else None,
        wrong_kinds=tuple(sorted(wrong | early)),
    )
