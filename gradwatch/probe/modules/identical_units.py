"""Find weight matrices with equal initial elements, so that their units are copies of each other."""

# M = matrices, N = leading elements

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gradwatch.events import WEIGHTS_ALIKE, Observation
from gradwatch.probe.device.sync import to_float, to_host
from gradwatch.records import LayerInfo

NUM_LEADING = 8
"""Number of leading elements to read first: random elements are never all equal."""


def find_identical_units(params: Sequence[Tensor], layers: Sequence[LayerInfo]) -> Iterator[Observation]:
    """Yield consecutive matrices, in the order of the model, that are each filled with one number other than 0.

    A single such matrix does no harm: the next one makes its units differ. Zeros are a way to start a branch closed.

    Args:
        params: The parameters before the first step.
        layers: The parameters' descriptions, in the same order.
    """
    matrices = [i for i, layer in enumerate(layers) if _is_matrix(params[i], layer)]
    # two stages: the cheap read of a few elements excludes all random matrices
    alike = {i for i in _constant_so_far(params, matrices) if to_float(_spread(params[i])) == 0}
    # -1 is never in `alike`; the first list is one longer, hence not strict
    for before, i, after in zip([-1, *matrices], matrices, [*matrices[1:], -1], strict=False):
        if i in alike and (before in alike or after in alike):
            yield WEIGHTS_ALIKE.observe(layers[i].module or layers[i].name, values={"place": i})


def _is_matrix(param: Tensor, layer: LayerInfo) -> bool:
    is_plain = type(param.data) is Tensor and param.is_floating_point() and not param.is_meta  # not a DTensor, say
    is_drawn = layer.module_type.startswith(("Linear", "Conv")) and param.requires_grad
    return is_plain and is_drawn and len(layer.shape) >= 2 and param.numel() >= NUM_LEADING


def _constant_so_far(params: Sequence[Tensor], matrices: Sequence[int]) -> list[int]:
    """Return the matrices with leading elements that are all the same number other than 0, in one wait."""
    if not matrices:
        return []
    # moved to one device, so that the host waits once
    heads = [params[i].detach().reshape(-1)[:NUM_LEADING].float() for i in matrices]
    heads_MN = to_host(torch.stack([head.to(heads[0].device) for head in heads]))
    return [i for i, head_N in zip(matrices, heads_MN, strict=True) if head_N[0] != 0 and (head_N == head_N[0]).all()]


def _spread(param: Tensor) -> Tensor:
    low, high = param.detach().aminmax()
    return high - low
