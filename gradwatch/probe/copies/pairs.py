"""Find modules whose parameters are a copy of trained ones, among those that no optimizer holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gradwatch.probe.copies.unheld import Unheld, holds
from gradwatch.probe.device.dtensor import has_values, local_part
from gradwatch.probe.device.sync import can_be_read, to_host
from gradwatch.probe.device.torch_reduce import wide_dtype
from gradwatch.probe.parameters import Models, named_modules

MIN_COSINE = 0.5
"""Minimum cosine of the matrices of two modules that are copies: independent initial weights have a cosine near 0."""

MAX_COPIES = 8
"""Maximum number of copies to follow: an actor and two critics have three."""

MAX_TENSORS = 8
"""Maximum number of matrices to sample of each copy."""

SAMPLED_ELEMENTS = 64
"""Elements to sample of each matrix. An average moves nearly all elements at each update."""

Signature = tuple[tuple[str, torch.Size], ...]


class Pair(NamedTuple):
    """A copy and the module that it is a copy of.

    Args:
        name: Path of the copy in the watched models, or None for a module outside of them.
        copy: The copy.
        trained: A module of the watched models with the same names and shapes of parameters.
        tensors: Each parameter of the copy with the parameter that an optimizer moves.
    """

    name: str | None
    copy: nn.Module
    trained: nn.Module
    tensors: Sequence[tuple[Tensor, Tensor]]


def find_pairs(models: Models, held: Collection[int], unheld: Iterable[Unheld]) -> list[Pair]:
    """Return the copies among modules that no optimizer holds, outermost first.

    Args:
        models: A model, or several by name.
        held: `id` of each parameter of the watched optimizers.
        unheld: Modules that no optimizer holds, the largest first: a part of a copy is a copy of a part.
    """
    trained = defaultdict[Signature, list[nn.Module]](list)
    for _, module in named_modules(models):
        if holds(module, held):
            trained[_signature(module)].append(module)
    found, covered = list[Pair](), set[nn.Module]()
    for name, module in unheld:
        twins = trained.get(_signature(module), ()) if module not in covered else ()
        pairs = [Pair(name, module, twin, _tensors(module, twin, held)) for twin in twins]
        near = [(cosine, pair) for pair in pairs if (cosine := _cosine(pair)) >= MIN_COSINE]
        if near:
            covered.update(module.modules())
            found.append(max(near, key=lambda it: it[0])[1])
    return found[:MAX_COPIES]


def sample(tensors: Sequence[Tensor]) -> NDArray[np.float64] | None:
    """Return some elements of some matrices, or None if they cannot be read now."""
    parts = [local_part(tensor).detach() for tensor in matrices(tensors)]
    if not parts or not all(part.layout == torch.strided and can_be_read(part) and has_values(part) for part in parts):
        return None
    chosen = [part.flatten()[:: max(1, part.numel() // SAMPLED_ELEMENTS)] for part in parts]
    wide = [values.to(wide_dtype(values.device)) for values in chosen]
    values: NDArray[np.float64] = to_host(torch.cat([values.to(wide[0]) for values in wide])).astype(np.float64)
    return values


def matrices(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return at most `MAX_TENSORS` matrices and kernels, spread over all tensors."""
    found = [tensor for tensor in tensors if tensor.ndim >= 2 and tensor.numel() and tensor.is_floating_point()]
    return found[:: max(1, -(-len(found) // MAX_TENSORS))]


def _cosine(pair: Pair) -> float:
    copies, originals = (sample([both[i] for both in pair.tensors]) for i in (0, 1))
    if copies is None or originals is None or copies.shape != originals.shape:
        return 0.0
    norms = float(np.linalg.norm(copies) * np.linalg.norm(originals))
    return float(copies @ originals) / norms if norms > 0 else 0.0


def _tensors(copy: nn.Module, trained: nn.Module, held: Collection[int]) -> Sequence[tuple[Tensor, Tensor]]:
    both = zip(copy.parameters(), trained.parameters(), strict=True)
    return [(mine, other) for mine, other in both if id(other) in held and other.requires_grad]


def _signature(module: nn.Module) -> Signature:
    return tuple((name, param.shape) for name, param in module.named_parameters())
