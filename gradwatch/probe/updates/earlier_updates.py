"""Detect that a model was trained in this process before its monitor was attached."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from torch import Tensor

from gradwatch.events import WEIGHTS_TRAINED, Observation

MIN_CHANGES = 32
"""Minimum number of in-place changes that show a training: an initialization makes a few."""


def find_earlier_updates(params: Sequence[Tensor]) -> Iterator[Observation]:
    """Yield an observation if most weights were changed repeatedly. Loaded weights were changed once and do not count.

    torch counts the in-place changes of a tensor; each optimizer step makes one or more.

    Args:
        params: The parameters before the first watched step.
    """
    # an inference tensor counts no changes
    changes = [param._version for param in params if param.requires_grad and not param.is_inference()]
    usual = statistics.median_low(changes) if changes else 0
    if usual >= MIN_CHANGES:
        yield WEIGHTS_TRAINED.observe(values={"changes": usual})
