"""Find parameters that nobody was told of: layers in a plain list, and groups of an optimizer that hold none."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

from torch import Tensor, nn
from torch.optim import Optimizer

from gradwatch.probe.graph import Graph
from gradwatch.probe.layout import Models, named_modules

LATER = 8
"""Step of the second look: whoever trains such a layer elsewhere has moved it by then."""

Fact = tuple[str, str | None, str, dict[str, float]]
"""Kind, layer, text and values of an event to be."""


@final
class Strays:
    """Compares the parameters that losses reach with those that `parameters()` gives, in two looks.

    A module assigned to an attribute is registered; in a list, tuple or dict it is not, and the optimizer that is
    given `model.parameters()` never sees it. Parameters of other models (a critic, a teacher) are on the tape too:
    only those that an attribute of this one holds count, and of them those that nothing has moved between the looks.
    Whether it moved says the version counter, which each update in place raises: no value is read.

    Args:
        models: A model, or several by name.
    """

    def __init__(self, models: Models) -> None:
        self._models = models
        self._seen: list[tuple[weakref.ref[Tensor], int]] = []

    def facts(self, graph: Graph, known: Mapping[Tensor, int], *, step: int) -> Iterator[Fact]:
        """Yield each attribute with parameters that were on the tape at the first look and have not moved since.

        Args:
            graph: Tape of the step's loss.
            known: The parameters of the model.
            step: Optimizer step.
        """
        leaves = [node.variable for node in graph.of("AccumulateGrad")]
        strays = [leaf for leaf in leaves if isinstance(leaf, nn.Parameter) and leaf not in known]
        if step < LATER:
            self._seen = self._seen or [(weakref.ref(stray), stray._version) for stray in strays]
            return
        before = {id(param): version for ref, version in self._seen if (param := ref()) is not None}
        still = {id(stray) for stray in strays if before.get(id(stray)) == stray._version}
        for name, params in self._attributes() if still else ():
            number = sum(id(param) in still for param in params)
            if number:
                text = (
                    f"the loss reaches {number} tensors in `{name}`, a plain container that parameters() does not see"
                )
                yield "parameters-unregistered", name, text, {"tensors": float(number)}

    def _attributes(self) -> Iterator[tuple[str, list[Tensor]]]:
        """Yield the parameters in each attribute that is a list, tuple or dict, with its full name."""
        for module_name, module in named_modules(self._models):
            for name, value in vars(module).items():
                params = list(_parameters(value)) if isinstance(value, (list, tuple, dict)) else []
                if params:
                    yield f"{module_name}.{name}" if module_name else name, params


def empty_groups(optimizers: Sequence[Optimizer]) -> Iterator[Fact]:
    """Yield the first group that holds no parameter, as one that was made of a generator which was used up."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    empty = [i for i, group in enumerate(groups) if not group["params"]]
    if empty:
        yield "group-empty", None, f"group {empty[0]} of the optimizer holds no parameter", {"group": float(empty[0])}


def _parameters(value: Any, *, depth: int = 2) -> Iterator[Tensor]:
    """Yield the parameters in a container, and in containers in it."""
    if isinstance(value, nn.Module):
        yield from value.parameters()
    elif isinstance(value, nn.Parameter):
        yield value
    elif depth and isinstance(value, (Sequence, Mapping)) and not isinstance(value, str):
        members = value.values() if isinstance(value, Mapping) else value
        for member in members:
            yield from _parameters(member, depth=depth - 1)
