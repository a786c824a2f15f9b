"""Remember calls of `load_state_dict` that matched no weight of a model, which then keeps its initial weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

from torch import nn

from gradwatch.events import WEIGHTS_NOT_LOADED, Observation
from gradwatch.probe.parameters import Models, named_modules


class UnmatchedLoad(NamedTuple):
    """A load with `strict=False` that matched no parameter.

    Args:
        missing: First name of the model that the loaded state lacks.
        unexpected: First name of the loaded state that the model lacks.
        tensors: Number of tensors in the loaded state.
        writes: Writes to the parameters up to then, as torch counts them.
    """

    missing: str
    unexpected: str
    tensors: int
    writes: int


FAILED: WeakKeyDictionary[nn.Module, UnmatchedLoad] = WeakKeyDictionary()
"""Failed loads of modules that no later load has made up for."""


def note_load(module: nn.Module, *, missing: Sequence[str], unexpected: Sequence[str]) -> None:
    """Remember a call of `load_state_dict` if it matched no parameter, or forget the earlier ones that it makes up for.

    Args:
        module: The module that the state was loaded into.
        missing: Names of the module that the state lacks.
        unexpected: Names of the state that the module lacks.
    """
    names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    if names and unexpected and names <= set(missing):
        FAILED[module] = UnmatchedLoad(missing[0], unexpected[0], len(unexpected), _writes(module))
        return
    inside = set(module.modules())
    for failed in [*FAILED]:
        if failed in inside or module in failed.modules():
            del FAILED[failed]


def find_failed_loads(models: Models) -> Iterator[Observation]:
    """Yield the models and parts of models that a load has left as they were, before the first step."""
    for name, module in named_modules(models):
        load = FAILED.get(module)
        if load is not None and load.writes == _writes(module):
            yield WEIGHTS_NOT_LOADED.observe(
                name or None, values={"tensors": load.tensors}, missing=load.missing, unexpected=load.unexpected
            )


def _writes(module: nn.Module) -> int:
    return sum(param._version for param in module.parameters() if not param.is_inference())
