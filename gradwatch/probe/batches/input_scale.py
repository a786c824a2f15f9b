"""Inspect the inputs of a model at the first steps: repeated samples, and validation inputs of a different scale."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from gradwatch.events import BATCH_ALIKE, INPUTS_ALIKE, INPUTS_DIFFER, Observation
from gradwatch.probe.batches.batch_hash import tensors
from gradwatch.probe.batches.origin import MAX_COORDINATES
from gradwatch.probe.batches.repeated_samples import INSPECTED_STEPS, RepeatedSamples
from gradwatch.probe.device.sync import can_be_read, to_float
from gradwatch.probe.inert_hook import add_input_hook, remove_hooks, takes_hooks
from gradwatch.probe.parameters import Models, is_compiled, named_modules
from gradwatch.records import Event

MIN_DISTANCE = 0.5
"""Minimum distance of two scales to record an event: a shift in deviations, or the logarithm of the ratio."""

MIN_NUMBERS = 64
"""Minimum number of values for a reliable mean and deviation."""


class InputScale(NamedTuple):
    """Mean and standard deviation of all numbers of an input."""

    mean: float
    deviation: float


def scale_of(inputs: Any) -> InputScale | None:
    """Return the scale of the first floating-point tensor, if it is large enough, waiting for its device."""
    found = next((leaf for leaf in tensors(inputs) if leaf.is_floating_point() and leaf.numel() >= MIN_NUMBERS), None)
    if found is None or not can_be_read(found) or found.layout != torch.strided:
        return None
    values = found.detach().float()
    return InputScale(to_float(values.mean()), to_float(values.std()))


def compare_scales(usual: InputScale | None, other: InputScale | None) -> Iterator[Observation]:
    """Yield the distance of the inputs of an evaluation from the training inputs, if their scales differ.

    Args:
        usual: Scale of the training inputs, or None if unknown.
        other: Scale of the inputs of the evaluation, or None if unknown.
    """
    # a constant input has no deviation to compare with
    if usual is None or other is None or not min(usual.deviation, other.deviation) > 0:
        return
    shift = abs(other.mean - usual.mean) / usual.deviation
    spread = abs(math.log(other.deviation / usual.deviation))
    if max(shift, spread) >= MIN_DISTANCE:
        yield INPUTS_DIFFER.observe(
            values={"shift": shift, "log of spread": spread},
            mean=other.mean,
            deviation=other.deviation,
            usual_mean=usual.mean,
            usual_deviation=usual.deviation,
        )


@final
class ModelInputs:
    """Compare the inputs of a model's first training forward call, at the steps that `RepeatedSamples` inspects.

    If a loop calls parts of a model instead of the model, the outermost called parts are inspected from step 1. With
    several parts, all of them must repeat their data, or one must repeat data that is allocated each time: a part may
    get the output of another part, or all existing items.

    Args:
        models: A model, or several by name.

    Attributes:
        step: Optimizer step in progress, set by the owner.
        is_traced: Whether torch.compile traced a forward call of a whole model, whose hooks it then does not call.
        scale: Scale of the inputs of the first step, or None.
    """

    def __init__(self, models: Models) -> None:
        self.step = 0
        self.is_traced = False
        self.scale: InputScale | None = None
        self._parts = dict(named_modules(models))
        self._first_step = 0
        self._sources: dict[str, RepeatedSamples] = {}
        self._inspected: dict[str, int] = {}
        self._alike: dict[str, Event] = {}
        roots = models if isinstance(models, Mapping) else {"": models}
        self._handles = [self._hook(name, root) for name, root in roots.items() if takes_hooks(root)]

    @property
    def is_over(self) -> bool:
        """Return whether there is nothing more to inspect."""
        return not self._handles

    @property
    def is_waiting(self) -> bool:
        """Return whether `find` must be called: there is something to report, or nothing more to inspect."""
        is_done = self.step - self._first_step >= INSPECTED_STEPS[-1] or all(
            it.is_over for it in self._sources.values()
        )
        return bool(self._handles) and (is_done or self._repeated() is not None)

    def close(self) -> None:
        """Remove all hooks."""
        remove_hooks(self._handles)

    def _before_forward(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not module.training:
            return
        if torch.compiler.is_compiling():
            self.is_traced = True
            return
        try:
            self.before(name, (args, kwargs))
        except Exception:  # an unknown kind of inputs: the forward call must go on
            self.close()

    def before(self, name: str, inputs: Any) -> None:
        """Inspect the inputs of a module, before its forward call."""
        step = self.step - self._first_step
        if self._inspected.get(name) == step or step > INSPECTED_STEPS[-1] or not torch.is_grad_enabled():
            return
        # an enclosing part was inspected at this step: the inputs of both come from the same batch
        if any(_is_inside(name, outer) and self._inspected.get(outer) == step for outer in self._sources):
            return
        if step > 0 and name not in self._sources:  # without a first batch there is nothing to compare with
            return
        if self._first_step and any(leaf.grad_fn is not None for leaf in tensors(inputs)):
            return  # the output of another part
        self._inspected[name] = step
        self.scale = self.scale or scale_of(inputs)
        samples = self._sources.setdefault(name, RepeatedSamples())
        self._alike.update(
            (name, event) for event in samples.inspect(inputs, step=step) if event.kind == BATCH_ALIKE.name
        )

    def find(self) -> Iterator[Observation]:
        """Yield an observation if all inspected inputs are alike, after an optimizer step."""
        if event := self._repeated():
            self.close()
            self._alike.clear()
            yield INPUTS_ALIKE.observe(values=event.values)
        elif self.step == 0 and not self._sources:  # the first step did not call the model itself
            self._inspect_parts()
        elif self.is_waiting:
            self.close()

    def _repeated(self) -> Event | None:
        """Return the event of repeated inputs: of all inputs, or of data that is allocated each time."""
        # few features may be points of a fixed grid
        found = [it for it in self._alike.values() if it.values["features"] > MAX_COORDINATES or it.values["integers"]]
        # flags as numbers: exact, and neither held nor integers
        allocated = [it for it in found if it.values["exact"] > it.values["held"] + it.values["integers"]]
        if not (allocated or (found and len(self._alike) == len(self._sources))):
            return None
        return (allocated or found)[0]

    def _inspect_parts(self) -> None:
        """Inspect the parts of a model that the loop does not call as a whole, unless they are compiled."""
        self.close()
        self._first_step = 1
        if not self.is_traced and not any(map(is_compiled, self._parts.values())):
            self._handles = [self._hook(name, part) for name, part in self._parts.items() if takes_hooks(part)]

    def _hook(self, name: str, module: nn.Module) -> RemovableHandle:
        return add_input_hook(module, partial(self._before_forward, name), is_compiled=True)


def _is_inside(name: str, outer: str) -> bool:
    # the model itself has an empty name
    return name != outer and (not outer or name.startswith(outer + "."))
