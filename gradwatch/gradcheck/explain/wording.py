"""Put mistakes into words: how a gradient differs, and in which Function."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from gradwatch.probe.place import Place

KIND_TEXT = {
    "missing_grad": "is missing: backward returns none, and the right one is not 0",
    "transposed": "is transposed",
    "no_grad_output": "does not depend on the gradient that backward gets",
    "batch": "is wrong for a batch of more than one sample",
    "negative": "is wrong where the input is negative, and right elsewhere",
    "channel": "is wrong for one channel, and right for the others",
    "eps": "is wrong by a misplaced epsilon: the error vanishes for large inputs",
    "inner_product": "lacks the sum over the outputs: the inner product of a softmax",
    "layout": "is wrong for memory that is not contiguous",
    "inplace": "is wrong because what backward reads was changed in place",
    "stale": "is wrong because backward reads a value of another time, such as a running statistic",
    "wrong_saved": "is wrong because another tensor is saved than the formula needs",
    "broadcast": "is summed over the wrong dimension",
    "detach": "lacks a term that is detached",
    "missing_term": "differs by a term",
    "sign": "has a term with the wrong sign",
}


@final
@dataclass(frozen=True, slots=True)
class Named:
    """The kind of a mistake, its place, and its ratio if it is one number."""

    kind: str
    place: Place
    ratio: float = math.nan


def listed(names: Sequence[str]) -> str:
    """Return the first names, and the number of others."""
    shown = ", ".join(f"`{n}`" for n in names[:3])
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def phrase(ratio: float) -> str:
    """Return the factor by which a gradient is too large or too small, as the end of a sentence."""
    if not math.isfinite(ratio):
        return ""
    if math.isclose(ratio, -1.0, rel_tol=1e-3):
        return ": its sign is flipped"
    if abs(ratio) < 1e-9:
        return ": it is 0"
    sign = " and its sign is flipped" if ratio < 0 else ""
    size = abs(ratio)
    if size > 1:
        return f": it is {size:.3g} times too large{sign}"
    inverse = 1 / size
    whole = f" (1/{round(inverse)})" if math.isclose(inverse, round(inverse), rel_tol=1e-3) else ""
    return f": it is {size:.3g}{whole} of the right one{sign}"


def function_text(named: Named, function: str, arguments: Sequence[str]) -> str:
    """Return the sentence on a mistake in a custom Function."""
    place = f" ({named.place})" if named.place else ""
    of = " and ".join(f"`{a}`" for a in arguments)
    begin = f"the gradient of {of} in {function}.backward{place}"
    if math.isclose(named.ratio, -1.0, rel_tol=1e-3):
        return f"{begin} has the wrong sign"
    if named.kind == "bias_mean":
        return f"{begin} is averaged where it is summed{phrase(named.ratio)}"
    if named.kind == "temperature":
        return f"{begin} lacks the factor of the temperature{phrase(named.ratio)}"
    if math.isfinite(named.ratio) and named.ratio and named.kind not in KIND_TEXT:
        return begin + phrase(named.ratio).replace(": it is", " is")
    return f"{begin} {KIND_TEXT.get(named.kind, 'is wrong')}"
