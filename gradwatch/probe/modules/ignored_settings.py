"""Find attributes by which a script means to freeze weights or to lower a learning rate, and that torch ignores."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, final

from torch import Tensor
from torch.optim import Optimizer

from gradwatch.events import FREEZE_IGNORED, RATE_IGNORED, Observation
from gradwatch.probe.parameters import Models, named_modules
from gradwatch.records import LayerInfo

FREEZE = re.compile(r"requires?d?_?grad(s|ients?)?")
"""Names like `requires_grad`. A tensor keeps any other attribute without a use, and so does a module this one."""

RATES = ("lr", "learning_rate")
"""Attributes that no optimizer of torch has: it reads the rates of its `param_groups`."""

LOWER = 0.9
"""Rate of the attribute, in units of the rate in use, from which the two differ."""


def find_ignored_freezes(
    models: Models, params: Sequence[Tensor], layers: Sequence[LayerInfo]
) -> Iterator[Observation]:
    """Yield an observation if an attribute is False that reads like `requires_grad`, and its tensors train.

    Args:
        models: The models.
        params: The parameters, in the order of `layers`.
        layers: The parameters' descriptions.
    """
    held = {id(p) for p, layer in zip(params, layers, strict=True) if layer.group is not None and p.requires_grad}
    found: dict[str, set[int]] = {}
    for param in params:
        if id(param) in held and (name := _freeze_of(param)):
            found.setdefault(name, set()).add(id(param))
    for _, module in named_modules(models):
        if name := _freeze_of(module):
            inside = {id(p) for p in module.parameters()}
            if inside and inside <= held:
                found.setdefault(name, set()).update(inside)
    tensors = set().union(*found.values())
    if tensors:
        names = [layer.name for p, layer in zip(params, layers, strict=True) if id(p) in tensors]
        values = {"tensors": len(tensors)}
        yield FREEZE_IGNORED.observe(names[0], values=values, attribute=" or ".join(f"`{name}`" for name in found))


def _freeze_of(owner: Any) -> str | None:
    """Return the name of an attribute of a tensor or a module that is False and reads like `requires_grad`."""
    # the true `requires_grad` of a tensor is none of its own attributes
    return next((name for name, value in vars(owner).items() if value is False and FREEZE.fullmatch(name)), None)


@final
class IgnoredRates:
    """Compare the attribute `lr` of optimizers, which torch does not read, with the rates in use.

    Args:
        optimizers: The optimizers. Only torch's own are looked at.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = [each for each in optimizers if type(each).__module__.startswith("torch.optim")]
        self._is_lower = False

    def find(self, _step: int = 0, /) -> Iterator[Observation]:
        """Yield an observation, after a step, if an attribute was lower than the rate in use at two steps."""
        for optimizer in self._optimizers:
            for name in RATES:
                wanted, rates = vars(optimizer).get(name), [group["lr"] for group in optimizer.param_groups]
                if isinstance(wanted, float) and all(isinstance(rate, float) for rate in rates):
                    is_lower = wanted <= LOWER * min(rates)
                    if is_lower and self._is_lower:
                        self._optimizers = []
                        values = {"wanted": wanted, "rate": min(rates)}
                        yield RATE_IGNORED.observe(values=values, attribute=name)
                        return
                    self._is_lower = is_lower
