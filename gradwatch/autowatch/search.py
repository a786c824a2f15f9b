"""Search the objects of a script for its models, and for the optimizers that move them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from gradwatch.probe.objects import live
from gradwatch.probe.place import users_frames, variables_of


def params_of(optimizers: Iterable[Optimizer]) -> dict[int, Tensor]:
    """Return the parameters of optimizers by their `id`."""
    return {
        id(param): param for optimizer in optimizers for group in optimizer.param_groups for param in group["params"]
    }


def find_outermost(optimizers: Sequence[Optimizer]) -> list[Optimizer]:
    """Return the optimizers without those that another one steps, as sharpness-aware minimization does."""
    inner = {
        id(value) for optimizer in optimizers for value in vars(optimizer).values() if isinstance(value, Optimizer)
    }
    return [optimizer for optimizer in optimizers if id(optimizer) not in inner]


def find_models(params: Mapping[int, Tensor], *, running: nn.Module | None) -> dict[str, nn.Module]:
    """Return the outermost modules that hold parameters, by the names of the script's variables.

    If modules share the parameters, the fewest that hold all of them are returned.

    Args:
        params: The parameters by their `id`.
        running: Module in its forward pass: it wins over other modules that hold as many of the parameters.
    """
    modules = live(nn.Module)
    parts = {id(part) for module in modules for part in _children(module)}
    held = {module: _held(module, params) for module in modules if id(module) not in parts}
    found: list[nn.Module] = []
    missing = {key for keys in held.values() for key in keys}
    while missing:
        best = max(held, key=lambda module: (len(held[module] & missing), module is running))
        found.append(best)
        missing -= held[best]
    position = {key: i for i, key in enumerate(params)}
    found.sort(key=lambda module: min(position[key] for key in held[module]))  # in the order of the optimizers
    return {"": found[0]} if len(found) == 1 else _named(found)


def _children(module: nn.Module) -> list[nn.Module]:
    try:
        return [*module.children()]
    except AttributeError:  # its `__init__` has not run
        return []


def _held(module: nn.Module, params: Mapping[int, Tensor]) -> set[int]:
    try:
        return {id(param) for param in module.parameters()} & params.keys()
    except AttributeError:
        return set()


def _named(models: Sequence[nn.Module]) -> dict[str, nn.Module]:
    """Return modules by the names of the script's variables, or of their classes."""
    names = _variables()
    named: dict[str, nn.Module] = {}
    for module in models:
        name = base = names.get(id(module)) or re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(module).__name__).lower()
        number = 1
        while name in named:
            number += 1
            name = f"{base}_{number}"
        named[name] = module
    return named


def _variables() -> dict[int, str]:
    """Return the names of the modules among the variables of the functions in progress, by the `id` of the module."""
    names: dict[int, str] = {}
    for frame in users_frames():  # the outermost function wins: a helper may name any model `net`
        variables = variables_of(frame).items()
        names |= {id(value): name for name, value in variables if issubclass(type(value), nn.Module)}
    return {key: name for key, name in names.items() if name != "self"}
