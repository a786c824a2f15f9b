"""Find parameters that an optimizer moves up the gradient, such as multipliers of constraints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor
from torch.optim import Optimizer

from gradwatch.events import ASCENDED, Observation
from gradwatch.records import LayerInfo


def find_ascended(
    params: Sequence[Tensor], layers: Sequence[LayerInfo], optimizers: Sequence[Optimizer]
) -> Iterator[Observation]:
    """Yield each parameter of a group with `maximize=True`, if other parameters are moved down the gradient.

    If all of them are moved up, the loss is an objective to maximize, and has no saddle point.

    Args:
        params: The watched parameters.
        layers: The parameters' descriptions, in the same order.
        optimizers: The watched optimizers.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    goes_up = {id(param): bool(group.get("maximize")) for group in groups for param in group["params"]}
    if all(goes_up.values()):
        return
    for param, layer in zip(params, layers, strict=True):
        if goes_up.get(id(param)):
            yield ASCENDED.observe(layer.name)
