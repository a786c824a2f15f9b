"""Find modules whose parameters are a copy of trained ones, and that no optimizer holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from gradwatch.probe.device.dtensor import has_values, local_part
from gradwatch.probe.device.sync import can_be_read, to_host
from gradwatch.probe.device.torch_reduce import wide_dtype
from gradwatch.probe.objects import live
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


def find_pairs(models: Models, optimizers: Sequence[Optimizer]) -> list[Pair]:
    """Return the copies among all modules of the process, outermost first; takes some 50 ms.

    Args:
        models: A model, or several by name.
        optimizers: The optimizers that move them.
    """
    held = _held_by(optimizers)
    watched = {module: name for name, module in named_modules(models)}
    roots = list(models.values()) if isinstance(models, Mapping) else [models]
    inside = {id(param) for module in watched for param in module.parameters(recurse=False)}
    wrappers = {part for root in roots for part in root.modules()}
    outside = [module for module in live(nn.Module) if module not in wrappers and module not in watched]
    candidates: list[tuple[str | None, nn.Module]] = [(watched[m], m) for m in watched if not _holds(m, held)]
    candidates += [(None, module) for module in outside if not _holds(module, inside)]
    candidates = [(name, module) for name, module in candidates if _has_shapes(module)]
    if not candidates:
        return []
    trained = defaultdict[Signature, list[nn.Module]](list)
    for module in watched:
        if _holds(module, held):
            trained[_signature(module)].append(module)
    others = _held_by(live(Optimizer))
    return list(_outermost(candidates, trained, held, others))[:MAX_COPIES]


def _outermost(
    candidates: Iterable[tuple[str | None, nn.Module]],
    trained: Mapping[Signature, Sequence[nn.Module]],
    held: Collection[int],
    others: Collection[int],
) -> Iterator[Pair]:
    covered: set[nn.Module] = set()
    # the largest first, since a part of a copy is a copy of a part
    for name, module in sorted(candidates, key=lambda it: -sum(1 for _ in it[1].modules())):
        if module in covered or _holds(module, others):
            continue
        twins = trained.get(_signature(module), ())
        pairs = [Pair(name, module, twin, _tensors(module, twin, held)) for twin in twins]
        near = [(cosine, pair) for pair in pairs if (cosine := _cosine(pair)) >= MIN_COSINE]
        if near:
            covered.update(module.modules())
            yield max(near, key=lambda it: it[0])[1]


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


def _has_shapes(module: nn.Module) -> bool:
    """Return whether a module has parameters, all of them initialized."""
    params = list(module.parameters())
    return bool(params) and not any(is_lazy(param) for param in params)


def _holds(module: nn.Module, params: Collection[int]) -> bool:
    return any(id(param) in params for param in module.parameters())


def _held_by(optimizers: Sequence[Optimizer]) -> set[int]:
    """Return the `id` of each parameter of some optimizers."""
    return {id(param) for optimizer in optimizers for group in optimizer.param_groups for param in group["params"]}
