"""Look at what a model is given in its first steps: the same samples again, or numbers of another scale elsewhere."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, final

import torch
from torch import nn

from gradwatch.probe.batch_hash import tensors
from gradwatch.probe.layout import Models
from gradwatch.probe.samples import LOOKS, Samples
from gradwatch.probe.transfer import to_float

COORDINATES = 4
"""Numbers of a sample up to which it may be a point in space and time, of a grid that is all there is."""

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

    Of several models that are watched together none is looked at: one may be given what another has made.

    Args:
        models: A model, or several by name.

    Attributes:
        step: Optimizer step under way, for whoever counts them to set.
        scale: That of the inputs of the first step, or None.
    """

    def __init__(self, models: Models) -> None:
        self.step = 0
        self.scale: Scale | None = None
        self._samples = Samples()
        self._looked = -1
        self._found: list[Fact] = []
        roots = list(models.values()) if isinstance(models, Mapping) else [models]
        self._handles = [
            root.register_forward_pre_hook(_Before(self), with_kwargs=True) for root in roots if len(roots) == 1
        ]

    @property
    def is_over(self) -> bool:
        """Whether there is nothing more to look at."""
        return not self._handles

    def close(self) -> None:
        """Take all hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def before(self, inputs: Any) -> None:
        """Look at inputs, before the forward call that they are for."""
        if self.step == self._looked or self.step not in LOOKS or not torch.is_grad_enabled():
            return
        self._looked = self.step
        self.scale = self.scale or scale_of(inputs)
        event = self._samples.look(inputs, step=self.step)
        if event and event.values["features"] > COORDINATES:
            self._found.append(("inputs-alike", None, event.text, event.values))

    def facts(self) -> Iterator[Fact]:
        """Yield that all inputs looked at were alike, after the optimizer step in which that came out."""
        yield from self._found
        self._found.clear()
        if self.step >= LOOKS[-1] or self._samples.is_over:
            self.close()


@final
class _Before:
    """The hook before a model. A copy of it, made or saved with the model, does nothing."""

    def __init__(self, inputs: Inputs | None = None) -> None:
        self._inputs = inputs

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._inputs is None or torch.compiler.is_compiling() or not module.training:
            return
        try:
            self._inputs.before((args, kwargs))
        except Exception:  # inputs of a kind that nobody here has seen: the forward call is worth more
            self._inputs.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Before, ()
