"""Remember which optimizers an open monitor watches: a second call of `watch` for one of them is a mistake."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from typing import final

from torch.optim import Optimizer

_watched: weakref.WeakSet[Optimizer] = weakref.WeakSet()


@final
class WatchedOptimizers:
    """Marks optimizers as watched until `remove`.

    Args:
        optimizers: The optimizers of a monitor.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = weakref.WeakSet(optimizers)
        _watched.update(optimizers)

    def remove(self) -> None:
        """Mark them as not watched."""
        _watched.difference_update(self._optimizers)


def warn_if_watched(optimizers: Sequence[Optimizer]) -> None:
    """Warn that an open monitor watches one of the optimizers, as in a loop that calls `watch` at each step."""
    if any(optimizer in _watched for optimizer in optimizers):
        text = (
            "another monitor watches this optimizer, and both go on; call watch() once, before the loop, or close the "
            "other monitor first"
        )
        warnings.warn(f"gradwatch: {text}", RuntimeWarning, stacklevel=3)
