"""Find layers with a lower learning rate of their own, which compensates for a large gradient."""

from __future__ import annotations

import math

from gradwatch.detect.features.structure import structure_of
from gradwatch.history.store import History


def has_lower_rate(history: History, tensor: int, *, own_rate: float) -> bool:
    """Return whether a tensor's group has a far lower rate than the groups of all other weight matrices.

    Args:
        history: History of the run.
        tensor: Index of the tensor.
        own_rate: Maximum rate of its group, over the lowest rate of the others.
    """
    own, *groups = (history.info.layers[i].group for i in (tensor, *structure_of(history).matrices.indices_M))
    rate, *others = (
        # nan, no optimizer, makes the comparison below False
        math.nan if group is None else float(history.run.newest(f"lr.{group}")[0])
        for group in (own, *(group for group in groups if group != own))
    )
    return bool(others) and rate <= own_rate * min(others)
