"""Look at what a model is given in its first steps, for loops that do not hand their batches over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, final

import torch
from torch import nn

from gradwatch.probe.layout import Models
from gradwatch.probe.samples import LOOKS, Samples

COORDINATES = 4
"""Numbers of a sample up to which it may be a point in space and time, of a grid that is all there is."""

Fact = tuple[str, str | None, str, dict[str, float]]
"""Kind, layer, text and values of an event to be."""


@final
class Inputs:
    """Compares the inputs of a model's first forward call in training, at the first steps that `Samples` looks at.

    Of several models that are watched together none is looked at: one may be given what another has made.

    Args:
        models: A model, or several by name.

    Attributes:
        step: Optimizer step under way, for whoever counts them to set.
    """

    def __init__(self, models: Models) -> None:
        self.step = 0
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
