"""Look at what a model is given in its first steps: the same samples again, or numbers of another scale elsewhere."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from gradwatch.probe.batches.batch_hash import tensors
from gradwatch.probe.batches.repeated_samples import COORDINATES, LOOKS, Samples
from gradwatch.probe.device.sync import to_float
from gradwatch.probe.inert_hook import inert_hook
from gradwatch.probe.parameters import Models, named_modules
from gradwatch.records import Event

NOTED = 0.5
"""Distance of two scales, as a shift in deviations or the logarithm of their ratio, from which on it is noted."""

ENOUGH = 64
"""Numbers from which on a mean and a deviation say something."""

Fact = tuple[str, str | None, str, dict[str, float]]
"""Kind, layer, text and values of an event to be."""


class Scale(NamedTuple):
    """Mean and deviation of all numbers of an input."""

    mean: float
    deviation: float


def scale_of(inputs: Any) -> Scale | None:
    """Return the scale of the first tensor of numbers with a point, where that is on a CPU and large enough."""
    found = next((leaf for leaf in tensors(inputs) if leaf.is_floating_point() and leaf.numel() >= ENOUGH), None)
    if found is None or found.device.type != "cpu" or found.layout != torch.strided:
        return None
    values = found.detach().float()
    return Scale(to_float(values.mean()), to_float(values.std()))


def differ(usual: Scale | None, other: Scale | None) -> Iterator[Fact]:
    """Yield how far the inputs of an evaluation are from those of training, where they are of another scale at all."""
    if usual is None or other is None or not min(usual.deviation, other.deviation) > 0:
        return
    shift = abs(other.mean - usual.mean) / usual.deviation
    spread = abs(math.log(other.deviation / usual.deviation))
    if max(shift, spread) >= NOTED:
        text = (
            f"validation inputs have a mean of {other.mean:.3g} and a deviation of {other.deviation:.3g}, those of "
            f"training {usual.mean:.3g} and {usual.deviation:.3g}"
        )
        yield "inputs-differ", None, text, {"shift": shift, "log of spread": spread}


@final
class Inputs:
    """Compares the inputs of a model's first forward call in training, at the first steps that `Samples` looks at.

    Where a loop calls parts of a model rather than the model, those parts are looked at, from step 1 on: the outermost
    that are called. Where several are, all have to be given the same, or one of them data that are made anew each time:
    a model may be given what another has made, or all the items that there are.

    Args:
        models: A model, or several by name.

    Attributes:
        step: Optimizer step under way, for whoever counts them to set.
        scale: That of the inputs of the first step, or None.
    """

    def __init__(self, models: Models) -> None:
        self.step = 0
        self.scale: Scale | None = None
        self._parts = dict(named_modules(models))
        self._began = 0
        self._sources: dict[str, Samples] = {}
        self._looked: dict[str, int] = {}
        self._alike: dict[str, Event] = {}
        roots = models if isinstance(models, Mapping) else {"": models}
        self._handles = [self._hook(name, root) for name, root in roots.items()]

    @property
    def is_over(self) -> bool:
        """Whether there is nothing more to look at."""
        return not self._handles

    @property
    def is_waiting(self) -> bool:
        """Whether there is something to tell, or nothing more to look at, and `facts` wants to be asked."""
        is_done = self.step - self._began >= LOOKS[-1] or all(it.is_over for it in self._sources.values())
        return bool(self._handles) and (is_done or self._verdict() is not None)

    def close(self) -> None:
        """Take all hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before_forward(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or not module.training:
            return
        try:
            self.before(name, (args, kwargs))
        except Exception:  # inputs of an unknown kind: the forward call must not fail
            self.close()

    def before(self, name: str, inputs: Any) -> None:
        """Look at inputs of a module, before the forward call that they are for."""
        step = self.step - self._began
        if self._looked.get(name) == step or step not in LOOKS or not torch.is_grad_enabled():
            return
        if any(_is_inside(name, outer) and self._looked.get(outer) == step for outer in self._sources):
            return
        if step > 0 and name not in self._sources:
            return
        if self._began and any(leaf.grad_fn is not None for leaf in tensors(inputs)):
            return  # what another part has made
        self._looked[name] = step
        self.scale = self.scale or scale_of(inputs)
        samples = self._sources.setdefault(name, Samples())
        self._alike.update((name, event) for event in samples.look(inputs, step=step) if event.kind == "batch-alike")

    def facts(self) -> Iterator[Fact]:
        """Yield that all inputs looked at were alike, after the optimizer step in which that came out."""
        if event := self._verdict():
            self.close()
            yield "inputs-alike", None, event.text, event.values
        elif self.step == 0 and not self._sources:
            self._look_inside()
        elif self.is_waiting:
            self.close()

    def _verdict(self) -> Event | None:
        """Return what is to be told of all that is given, or of data among it that are made anew each time."""
        telling = [it for it in self._alike.values() if it.values["features"] > COORDINATES or it.values["integers"]]
        made = [it for it in telling if it.values["exact"] > it.values["held"] + it.values["integers"]]
        if not (made or (telling and len(self._alike) == len(self._sources))):
            return None
        return (made or telling)[0]

    def _look_inside(self) -> None:
        """Look at the parts of a model that nobody calls as a whole, unless a compiler has gone over them."""
        self.close()
        self._began = 1
        if not any(hasattr(part, "_orig_mod") or part._compiled_call_impl for part in self._parts.values()):
            self._handles = [self._hook(name, part) for name, part in self._parts.items()]

    def _hook(self, name: str, module: nn.Module) -> RemovableHandle:
        return module.register_forward_pre_hook(inert_hook(partial(self._before_forward, name)), with_kwargs=True)


def _is_inside(name: str, outer: str) -> bool:
    """Say whether a module is a part of another."""
    return name != outer and (not outer or name.startswith(outer + "."))
