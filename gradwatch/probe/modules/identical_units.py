"""Find weight matrices whose elements are all alike before the first step: their units are copies of each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gradwatch.probe.device.sync import to_float, to_host
from gradwatch.records import LayerInfo

Fact = tuple[str, str | None, str, dict[str, float]]
"""Kind, layer, text and values of an event to be."""

PEEK = 8
"""Leading elements that are looked at first: of a matrix that was drawn they are never all equal."""


def facts(params: Sequence[Tensor], layers: Sequence[LayerInfo]) -> Iterator[Fact]:
    """Yield the matrices in a row, in the order of the model, that are each filled with one number other than 0.

    One such matrix is no harm: what comes behind it tells its units apart. Zeros are a way to start a branch closed.

    Args:
        params: The parameters before the first step.
        layers: What they are.
    """
    matrices = [i for i, layer in enumerate(layers) if _is_matrix(params[i], layer)]
    peeks: dict[torch.device, list[int]] = {}
    for i in matrices:
        peeks.setdefault(params[i].device, []).append(i)
    suspects = {i for device, group in peeks.items() for i in _peek(params, group, device)}
    alike = {i for i in suspects if to_float(_spread(params[i])) == 0}
    for before, i, behind in zip([-1, *matrices], matrices, [*matrices[1:], -1], strict=False):
        if i in alike and (before in alike or behind in alike):
            text = "all weights are equal, as those beside it are: its units are copies of each other and stay so"
            yield "weights-alike", layers[i].module or layers[i].name, text, {"place": float(i)}


def _is_matrix(param: Tensor, layer: LayerInfo) -> bool:
    is_plain = type(param.data) is Tensor and param.is_floating_point() and not param.is_meta  # and not sharded, say
    is_drawn = layer.module_type.startswith(("Linear", "Conv")) and param.requires_grad
    return is_plain and is_drawn and len(layer.shape) >= 2 and param.numel() >= PEEK


def _peek(params: Sequence[Tensor], group: Sequence[int], device: torch.device) -> list[int]:
    """Return those of some parameters whose leading elements are all one number other than 0, in one wait."""
    heads = [params[i].detach().reshape(-1)[:PEEK].float() for i in group]
    heads_GP = to_host(torch.stack(heads))
    return [i for i, head_P in zip(group, heads_GP, strict=True) if head_P[0] != 0 and (head_P == head_P[0]).all()]


def _spread(param: Tensor) -> Tensor:
    low, high = param.detach().aminmax()
    return high - low
