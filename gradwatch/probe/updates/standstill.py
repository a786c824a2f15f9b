"""Detect that no optimizer updates the weights, and that nothing else moves them either."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import final

from torch import Tensor

from gradwatch.events import WEIGHTS_STILL, Observation
from gradwatch.probe.device.dtensor import has_values
from gradwatch.probe.updates.outside_moves import fingerprints
from gradwatch.records import LayerInfo

FIRST_STEP = 8
"""Step from which sums and norms are compared. A loop with updates has changed the versions of its weights by then."""

WAITED_STEPS = 40
"""Step at which to report. Few loops accumulate gradients over more calls of `Monitor.step`."""


@final
class Standstill:
    """Compare the weights that the watched optimizers hold, until one of them moves.

    An update changes the version of a tensor, which is a number. Sums and norms are compared only where the versions
    stay the same, since a replay of a CUDA graph changes none.

    Args:
        params: The parameters, in the order of `layers`.
        layers: The parameters' descriptions.
    """

    def __init__(self, params: Sequence[Tensor], layers: Sequence[LayerInfo]) -> None:
        held = (param for param, layer in zip(params, layers, strict=True) if layer.group is not None)
        self._params = [param for param in held if param.requires_grad and not param.is_meta]
        self._versions = [param._version for param in self._params]
        self._before: list[bytes] | None = None

    def find(self, step: int) -> Iterator[Observation]:
        """Yield an observation if no weight has moved since the start.

        Args:
            step: Finished optimizer step.
        """
        if not self._params:
            return
        if [param._version for param in self._params] != self._versions or not all(map(has_values, self._params)):
            self._params = []
        elif self._before is None:
            self._before = fingerprints(self._params) if step >= FIRST_STEP else None
        elif step >= WAITED_STEPS:
            if fingerprints(self._params) == self._before:
                yield WEIGHTS_STILL.observe(values={"steps": step + 1})
            self._params = []
