"""Find weights that the loop clips after each update: many of their values are the bound."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import final

import torch
from torch import Tensor

from gradwatch.events import WEIGHTS_CLIPPED, Observation
from gradwatch.probe.device.dtensor import has_values, local_part
from gradwatch.probe.device.sync import Arrival
from gradwatch.probe.device.torch_reduce import stored_values
from gradwatch.probe.updates.outside_moves import runs
from gradwatch.records import LayerInfo

FIRST_LOOK = 20
"""Step of the first look. Each further look is twice as late."""

MIN_NUMBERS = 64
"""Minimum number of values: with fewer, the largest and the smallest are a large part of them by chance."""

MIN_SHARE = 0.1
"""Minimum fraction of the values that are the largest or the smallest. Without a bound, no two are the same."""


@final
class ClippedWeights:
    """Count the values of each weight that are its largest or its smallest, at few steps.

    A weight that an optimizer holds is reported once, unless it was made so. Each process looks at its own part of a
    distributed weight.

    Args:
        params: The parameters, in the order of `layers`.
        layers: The parameters' descriptions.
    """

    def __init__(self, params: Sequence[Tensor], layers: Sequence[LayerInfo]) -> None:
        self._layers = layers
        self._params = {
            i: param
            for i, param in enumerate(params)
            if layers[i].group is not None and not param.is_meta and param.numel() >= MIN_NUMBERS
        }
        self._next = FIRST_LOOK
        self._sent: Arrival | None = None
        self._due: list[int] = []  # the weights of the shares that were sent

    def begin(self) -> None:
        """Leave out the weights that are made with many values at a bound, before the first step."""
        self._send()
        self._arrived(wait=True)

    def find(self, step: int, /) -> Iterator[Observation]:
        """Yield each run of consecutive weights with many values at a bound.

        Args:
            step: Finished optimizer step.
        """
        if step >= self._next:
            self._next = 2 * step
            self._send()
        for first, last in runs(self._arrived()):
            names = [self._layers[i].name for i in (first, last)]
            values = {"first": first, "last": last}
            yield WEIGHTS_CLIPPED.observe(names[0], values=values, weights=" to ".join(dict.fromkeys(names)))

    def _send(self) -> None:
        """Send the shares at the bounds to the host; those of a GPU arrive later."""
        due = {i: param for i, param in self._params.items() if param.requires_grad and has_values(param)}
        shares = [_share_at_bounds(param) for param in due.values()]
        self._due = list(due)
        self._sent = Arrival([torch.stack([share.to(shares[0]) for share in shares])]) if shares else None

    def _arrived(self, *, wait: bool = False) -> list[int]:
        """Return the indices of weights with many values at a bound, which are not looked at again."""
        if self._sent is None or not (wait or self._sent.is_ready):
            return []
        (shares_P,), self._sent = self._sent.values(), None
        clipped = [i for i, share in zip(self._due, shares_P, strict=True) if share >= MIN_SHARE]
        for i in clipped:
            del self._params[i]
        return clipped


def _share_at_bounds(param: Tensor) -> Tensor:
    values = stored_values(local_part(param).detach())
    least, most = values.amin(), values.amax()
    # a constant weight has no bounds, and pruned values are 0
    is_bound = ((values == least) | (values == most)) & (values != 0)
    return is_bound.float().mean() * (least < most)
