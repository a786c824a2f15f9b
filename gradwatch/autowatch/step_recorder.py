"""Collect the inputs of a loop's forward passes, and record its steps."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradwatch.autowatch.validation import Validation
from gradwatch.probe.device.sync import is_on_host, to_float
from gradwatch.probe.inert_hook import add_input_hook, remove_hooks
from gradwatch.probe.nested import has_plain_values, tensors_of

if TYPE_CHECKING:
    from gradwatch.monitor import Monitor

MAX_INPUTS = 64
"""Maximum number of forward passes per step whose inputs are kept: a reinforcement learner has one for each action."""


@final
class StepRecorder:
    """Calls `Monitor.step` with a loss and the inputs that led to it. It does not keep the models alive.

    Args:
        monitor: The monitor of the loop.
        called: The modules that the loop calls.
        part: One of them that is only a part of a model, or None. Its inputs may be a part of the data, such as a
            category that all samples share, so constant inputs are ignored.

    Attributes:
        num_steps: Steps recorded so far.
        validation: What the script evaluates between two steps.
    """

    def __init__(self, monitor: Monitor, called: Iterable[nn.Module], *, part: nn.Module | None = None) -> None:
        self._monitor = weakref.ref(monitor)
        self.num_steps = 0
        self.validation = Validation()
        self._part = id(part)
        self._inputs: list[Any] = []
        self._batch: list[Any] = []
        self._handles: list[RemovableHandle] = [add_input_hook(module, self._keep_inputs) for module in called]

    @property
    def monitor(self) -> Monitor | None:
        """The monitor, as long as the script keeps the model."""
        return self._monitor()

    def begin_backward(self) -> None:
        """Add the inputs since the last backward pass to the batch of the step."""
        self._batch += self._inputs
        self._inputs = []

    def forget_inputs(self) -> None:
        """Drop the inputs since the last backward pass."""
        self._inputs = []

    def forget(self) -> None:
        """Drop the batch so far: the loop has cleared its gradients."""
        self._batch = []

    def record(self, loss: Tensor | None) -> None:
        """Record a step; its loss is None if no backward pass led to it."""
        batch = self._batch[0] if len(self._batch) == 1 else self._batch or None
        self._batch, val_loss = [], self.validation.end()
        self.num_steps += 1
        monitor = self._monitor()
        if monitor is not None:
            monitor.step(loss, batch=batch, val_loss=val_loss)

    def detach(self) -> None:
        """Remove the hooks of the inputs."""
        remove_hooks(self._handles)

    def _keep_inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if not torch.is_grad_enabled():
            self.validation.is_running = True
        # passes for validation are not part of the batch
        if torch.is_grad_enabled() and module.training and len(self._inputs) < MAX_INPUTS:
            inputs = [value for value in (*args, *kwargs.values()) if value is not None and not _is_computed(value)]
            if id(module) == self._part and all(map(_is_constant, tensors_of(inputs))):
                return
            if inputs:
                self._inputs.append(inputs[0] if len(inputs) == 1 else inputs)


def total(losses: Sequence[Tensor]) -> Tensor:
    """Return the sum of losses, with its autograd graph; for one loss, the loss itself."""
    result = losses[0]
    for loss in losses[1:]:
        result = result + loss.to(result.device)
    return result


def _is_computed(value: Any) -> bool:
    """Return whether a value was computed from parameters, such as the state of a recurrence: it is not data."""
    return isinstance(value, Tensor) and value.requires_grad


def _is_constant(tensor: Tensor) -> bool:
    """Return whether all values of a tensor in host memory are the same."""
    if not is_on_host(tensor) or not has_plain_values(tensor):
        return False
    return to_float((tensor == tensor.flatten()[:1]).all()) == 1
