"""Find parameters that joined the model after the monitor attached, by identity."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import final

from torch import Tensor, nn
from torch.optim import Optimizer

from gradwatch.events import PARAMETERS_JOINED, PARAMETERS_NEW, Observation
from gradwatch.probe.device.dtensor import gathers, has_values
from gradwatch.probe.parameters import Models, named_modules
from gradwatch.probe.updates.outside_moves import fingerprints
from gradwatch.records import LayerInfo

EVERY_STEPS = 10
"""Minimum steps between two comparisons. By the second, an optimizer elsewhere has moved a new parameter."""


@final
class ParameterChanges:
    """Compare the parameters of the model with those at the start.

    A new parameter is reported if it has a gradient, no watched optimizer holds it, and nothing has moved it since an
    earlier comparison. So are new parameters that a watched optimizer holds, such as a head for the next task.
    Nothing is compared under FSDP, which replaces parameters by itself.

    Args:
        models: A model, or several by name.
        params: Its parameters at the start, in the order of `layers`.
        layers: The parameters' descriptions.
        optimizers: The optimizers.
    """

    def __init__(
        self, models: Models, params: Sequence[Tensor], layers: Sequence[LayerInfo], optimizers: Sequence[Optimizer]
    ) -> None:
        self._models, self._optimizers = models, optimizers
        self._layers = {id(param): layer for param, layer in zip(params, layers, strict=True)}
        self._params = list(params)  # so that their ids stay unique
        self._roots = list(models.values()) if isinstance(models, Mapping) else [models]
        self._is_gathered = any(gathers(module) for _, module in named_modules(models))
        self._new: dict[int, tuple[weakref.ref[Tensor], tuple[int, bytes] | None]] = {}  # None: nothing to report
        self._next, self._last = 1, 0

    def find(self, step: int) -> Iterator[Observation]:
        """Yield what has changed since the last comparison.

        Args:
            step: Finished optimizer step.
        """
        if step < self._next or self._is_gathered:
            return
        since, self._last = self._last, step
        self._next = step - step % EVERY_STEPS + EVERY_STEPS
        now = _ids_of_parameters(self._roots)
        if now - self._layers.keys():
            yield from self._find_new({layer.name for key, layer in self._layers.items() if key not in now})
            yield from self._find_joined(since)

    def _find_new(self, gone: set[str]) -> Iterator[Observation]:
        """Yield the new parameters, given the names of those that have left the model."""
        held = self._held()
        by_module: dict[str, list[str]] = {}
        for module_name, module in named_modules(self._models):
            for own_name, param in module.named_parameters(recurse=False):
                if id(param) not in self._layers and self._is_left_out(param, held):
                    full_name = f"{module_name}.{own_name}" if module_name else own_name
                    by_module.setdefault(module_name, []).append(full_name)
        for module_name, found in by_module.items():
            replaced = len(gone.intersection(found))
            yield PARAMETERS_NEW.observe(
                module_name or found[0],
                values={"tensors": len(found), "replaced": replaced},
                parameters=_list(found),
                how="took the place of a watched parameter" if replaced else "joined the model",
                pronoun="it" if len(found) == 1 else "them",
            )

    def _find_joined(self, since: int) -> Iterator[Observation]:
        held, found = self._held(), []
        for module_name, module in named_modules(self._models):
            for own_name, param in module.named_parameters(recurse=False):
                seen, _ = self._new.get(id(param), (None, None))
                is_known = id(param) in self._layers or (seen is not None and seen() is param)
                if not is_known and id(param) in held:
                    self._new[id(param)] = weakref.ref(param), None
                    found.append(f"{module_name}.{own_name}" if module_name else own_name)
        if found:
            values = {"tensors": len(found), "since": since}
            are = "is" if len(found) == 1 else "are"
            yield PARAMETERS_JOINED.observe(values=values, parameters=_list(found), are=are)

    def _is_left_out(self, param: Tensor, held: set[int]) -> bool:
        """Return whether a new parameter has a gradient that nothing has used since an earlier comparison."""
        seen, before = self._new.get(id(param), (None, None))
        if seen is not None and seen() is param and before is None:
            return False  # reported, or moved by other code
        if id(param) in held or not param.requires_grad or param.grad is None or not has_values(param):
            return False
        state = param._version, fingerprints([param])[0]
        is_first = seen is None or seen() is not param
        self._new[id(param)] = weakref.ref(param), state if is_first else None
        return not is_first and state == before

    def _held(self) -> set[int]:
        return {id(p) for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"]}


def _list(names: Sequence[str]) -> str:
    rest = len(names) - 1
    return f"`{names[0]}`" + (f" and {rest} more" if rest else "")


def _ids_of_parameters(roots: Sequence[nn.Module]) -> set[int]:
    """Return the ids of all parameters: faster than `named_parameters`, which builds names."""
    found: set[int] = set()
    modules, seen = [*roots], set(roots)
    while modules:
        module = modules.pop()
        found.update(id(param) for param in module._parameters.values() if param is not None)
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                modules.append(child)
    return found
