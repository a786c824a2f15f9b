"""Find the blocks of a model: the children of its outermost containers."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

Containers = (nn.Sequential, nn.ModuleList)


def outermost_containers(model: nn.Module) -> Iterator[nn.Sequential | nn.ModuleList]:
    """Yield the outermost containers of a model with more than one child; the children are its blocks."""
    for child in model.children():
        # a container of one child has nothing to split, so look for blocks inside it
        if isinstance(child, Containers) and len(child) > 1:
            yield child
        else:
            yield from outermost_containers(child)


def block_names(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the blocks of a model, in the order of the model."""
    names = {module: name for name, module in model.named_modules()}
    return tuple(names[block] for container in outermost_containers(model) for block in container)
