"""Find the modules of the process that have parameters which no optimizer holds."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from gradwatch.probe.objects import live, reachable
from gradwatch.probe.parameters import Models, named_modules


class Unheld(NamedTuple):
    """A module whose parameters no optimizer holds, and its path in the watched models, or None outside of them."""

    name: str | None
    module: nn.Module


def find_unheld(models: Models, held: Collection[int]) -> list[Unheld]:
    """Return the modules with parameters that no optimizer of the process holds, the largest first.

    Modules outside of the watched models are those that the user's variables lead to, since a search of the whole
    process takes as long as many small steps. Wrappers of the watched models, and other modules that share their
    parameters, are left out.

    Args:
        models: A model, or several by name.
        held: `id` of each parameter of the watched optimizers.
    """
    watched = {module: name for name, module in named_modules(models)}
    roots = list(models.values()) if isinstance(models, Mapping) else [models]
    params = {id(param) for module in watched for param in module.parameters(recurse=False)}
    wrappers = {part for root in roots for part in root.modules()}
    reached = {part: None for module in reachable(nn.Module) for part in module.modules()}
    outside = [module for module in reached if module not in wrappers and module not in watched]
    found = [Unheld(watched[module], module) for module in watched if not holds(module, held)]
    found += [Unheld(None, module) for module in outside if not holds(module, params)]
    found = [it for it in found if _has_shapes(it.module)]
    if not found:
        return []
    others = held_by(live(Optimizer))
    unheld = [it for it in found if not holds(it.module, others)]
    return sorted(unheld, key=lambda it: -sum(1 for _ in it.module.modules()))


def holds(module: nn.Module, params: Collection[int]) -> bool:
    """Return whether a module has one of some parameters, given by their `id`."""
    return any(id(param) in params for param in module.parameters())


def held_by(optimizers: Iterable[Optimizer]) -> set[int]:
    """Return the `id` of each parameter of some optimizers."""
    return {id(param) for optimizer in optimizers for group in optimizer.param_groups for param in group["params"]}


def _has_shapes(module: nn.Module) -> bool:
    """Return whether a module has parameters, all of them initialized."""
    params = list(module.parameters())
    return bool(params) and not any(is_lazy(param) for param in params)
