"""Find parameters that joined the model after the monitor attached, by identity."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, final

from torch import Tensor, nn
from torch.optim import Optimizer

from gradwatch.events import PARAMETERS_JOINED, PARAMETERS_NEW, Observation
from gradwatch.probe.device.dtensor import gathers, has_values
from gradwatch.probe.parameters import Models, named_modules
from gradwatch.probe.updates.outside_moves import fingerprints
from gradwatch.records import LayerInfo

EVERY_STEPS = 10
"""Minimum steps between two comparisons. By the second, an optimizer elsewhere has moved a new parameter."""


class _Use(enum.Enum):
    """What happens to the gradient of a new parameter."""

    NONE = enum.auto()
    UPDATED = enum.auto()


class _NewParameter(NamedTuple):
    """A parameter that the monitor does not read.

    Args:
        param: Weak reference to it.
        since: Step of the newest comparison without it.
        state: Its version counter and fingerprint when it first had a gradient.
        is_over: Whether its use is known.
    """

    param: weakref.ref[Tensor]
    since: int
    state: tuple[int, bytes] | None = None
    is_over: bool = False


@final
class ParameterChanges:
    """Compare the parameters of the model with those at the start.

    A new parameter is reported if it has a gradient, no watched optimizer holds it, and nothing has moved it since an
    earlier comparison. So are new parameters that a watched optimizer holds, such as a head for the next task, or that
    other code moves: the monitor does not read them. FSDP replaces parameters by itself, so nothing is compared then.

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
        self._new: dict[int, _NewParameter] = {}
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
            yield from self._observe({layer.name for key, layer in self._layers.items() if key not in now}, since)

    def _observe(self, gone: set[str], since: int) -> Iterator[Observation]:
        """Yield the new parameters, given the names of those that have left the model."""
        held = {id(p) for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"]}
        left_out: dict[str, list[str]] = {}
        joined: dict[str, int] = {}
        for module_name, module in named_modules(self._models):
            for own_name, param in module.named_parameters(recurse=False):
                if id(param) in self._layers:
                    continue
                full_name = f"{module_name}.{own_name}" if module_name else own_name
                new = self._seen(param) or _NewParameter(weakref.ref(param), since)
                match self._use_of(param, new, is_held=id(param) in held):
                    case _Use.NONE:
                        left_out.setdefault(module_name, []).append(full_name)
                    case _Use.UPDATED:
                        joined[full_name] = new.since
        for module_name, found in left_out.items():
            replaced = len(gone.intersection(found))
            yield PARAMETERS_NEW.observe(
                module_name or found[0],
                values={"tensors": len(found), "replaced": replaced},
                parameters=_list(found),
                how="took the place of a watched parameter" if replaced else "joined the model",
                pronoun="it" if len(found) == 1 else "them",
            )
        if joined:
            values = {"tensors": len(joined), "since": min(joined.values())}
            are = "is" if len(joined) == 1 else "are"
            yield PARAMETERS_JOINED.observe(values=values, parameters=_list([*joined]), are=are)

    def _seen(self, param: Tensor) -> _NewParameter | None:
        new = self._new.get(id(param))
        return None if new is None or new.param() is not param else new  # else the id of a discarded tensor

    def _use_of(self, param: Tensor, new: _NewParameter, *, is_held: bool) -> _Use | None:
        """Return how a new parameter is used, once; None if that is unknown, or was returned before."""
        if new.is_over:
            return None
        if is_held:
            self._new[id(param)] = new._replace(is_over=True)
            return _Use.UPDATED
        if not param.requires_grad or param.grad is None or not has_values(param):
            return None
        state = param._version, fingerprints([param])[0]
        self._new[id(param)] = new._replace(state=state, is_over=new.state is not None)
        if new.state is None:
            return None
        return _Use.NONE if state == new.state else _Use.UPDATED


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
