"""Detect that no optimizer updates the weights, and that nothing else moves most of them either."""

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
    """Compare the weights that the watched optimizers hold, until most of them have moved.

    A loop may move a few by hand, for example to normalize the columns of a matrix. An update changes the version
    counter of a tensor. Sums and norms are compared only where the versions stay the same, since a replay of a CUDA
    graph changes none.

    Args:
        params: The parameters, in the order of `layers`.
        layers: The parameters' descriptions.
    """

    def __init__(self, params: Sequence[Tensor], layers: Sequence[LayerInfo]) -> None:
        held = (param for param, layer in zip(params, layers, strict=True) if layer.group is not None)
        self._still = [(param, param._version) for param in held if param.requires_grad and not param.is_meta]
        self._held = len(self._still)
        self._before: dict[int, bytes] | None = None

    def find(self, step: int, /) -> Iterator[Observation]:
        """Yield an observation if most weights have not moved since the start.

        Args:
            step: Finished optimizer step.
        """
        if not self._still:
            return
        self._still = [(param, version) for param, version in self._still if param._version == version]
        if 2 * len(self._still) < self._held or not all(has_values(param) for param, _ in self._still):
            self._still = []
        elif self._before is None:
            self._before = self._fingerprints() if step >= FIRST_STEP else None
        elif step >= WAITED_STEPS:
            still = sum(mark == self._before[key] for key, mark in self._fingerprints().items())
            if 2 * still >= self._held:
                values = {"still": float(still), "held": float(self._held), "steps": step + 1.0}
                yield WEIGHTS_STILL.observe(values=values)
            self._still = []

    def _fingerprints(self) -> dict[int, bytes]:
        """Return the marks of the tensors that have kept their version, by the identity of each."""
        params = [param for param, _ in self._still]
        return dict(zip(map(id, params), fingerprints(params), strict=True))
