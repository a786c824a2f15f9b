"""Find layers with a lower learning rate of their own, which compensates for a large gradient."""

from __future__ import annotations

import math

from gradwatch.detect.features.structure import structure_of
from gradwatch.history.store import History

MAX_OWN_RATE = 0.1
"""Rate of a layer's group, over the lowest rate of the others, at which it compensates for a large gradient."""


def has_lower_rate(history: History, tensor: int) -> bool:
    """Return whether a tensor's group has a far lower rate than the groups of all other weight matrices."""
    own, *groups = (history.info.layers[i].group for i in (tensor, *structure_of(history).matrices.indices_M))
    rate, *others = (
        # nan, no optimizer, makes the comparison below False
        math.nan if group is None else float(history.run.newest(f"lr.{group}")[0])
        for group in (own, *(group for group in groups if group != own))
    )
    return bool(others) and rate <= MAX_OWN_RATE * min(others)
