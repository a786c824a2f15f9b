"""Run a step any number of times from the same state, and trace every operation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gradwatch.probe.graph.dispatched import uncompiled
from gradwatch.probe.graph.in_place import explain_in_place
from gradwatch.replay.locate.module_stack import ModuleStack
from gradwatch.replay.locate.nan_origin import NanOrigin, find_origin
from gradwatch.replay.locate.op_tracer import OpTracer
from gradwatch.replay.locate.records import Operation, Value
from gradwatch.state.rng import random_state, set_random_state

Step = Callable[..., Any]
USUAL = ("inputs", "targets")
"""Names of the parts of a batch with at most two parts; the parts of other batches are numbered."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """The traced operations of a step.

    Args:
        operations: Operations in the order in which they ran.
        losses: Tensors that the step returned.
    """

    operations: Sequence[Operation]
    losses: tuple[Value, ...]

    @property
    def start(self) -> NanOrigin | None:
        """Origin of the first non-finite value, or None if the loss and the gradients are finite."""
        return find_origin(self.operations, self._sinks())

    @property
    def reaches(self) -> tuple[str, ...]:
        """Affected results: the loss, or the parameters with non-finite gradients."""
        # a bad loss makes most gradients bad, so their list would say nothing
        if any(v.bad for v in self.losses):
            return ("the loss",)
        return tuple(dict.fromkeys(o.leaf for o in self.operations if o.leaf and any(v.bad for v in o.inputs)))

    def forward_of(self, operation: Operation) -> Operation | None:
        """Return the forward operation that an operation of the backward pass belongs to, or None."""
        return None if operation.forward is None else self.operations[operation.forward]

    def _sinks(self) -> list[Value]:
        """Return the bad losses, or else the bad gradients, or else the last outputs if the step returned no loss."""
        bad = [v for v in self.losses if v.bad]
        bad = bad or [v for o in self.operations if o.leaf for v in o.inputs if v.bad]
        if bad or self.losses:
            return bad
        return [v for o in self.operations[-1:] for v in o.outputs]


@final
class StepTracer:
    """Runs a step repeatedly from the random state at the creation of this object.

    Args:
        step: Function of a batch that returns the loss, or None.
        model: Model that the step uses, or None to detect the called modules.
    """

    def __init__(self, step: Step, *, model: nn.Module | None = None) -> None:
        self._step = step
        self._model = model
        self._random = random_state()

    def run(self, batch: Sequence[Any], *, widen: bool = False) -> TracedStep:
        """Trace the step on a batch, and restore the state afterwards.

        Args:
            batch: Parts of the batch.
            widen: Whether to compute in float32 instead of half formats.
        """
        modules = ModuleStack(self._model)
        for tensor, name in _named(batch):
            modules.name(tensor, name, "input")
        tracer = OpTracer(modules, within=_called.__code__, widen=widen)
        set_random_state(self._random)
        try:
            with modules, uncompiled(), torch.enable_grad(), tracer:
                losses = _called(self._step, batch)
                # an addition to a parameter's gradient shows that the step ran its backward pass itself
                if not any(o.leaf for o in tracer.operations):
                    _run_backward(losses)
            return TracedStep(operations=tracer.operations, losses=tuple(tracer.value(loss) for loss in losses))
        except RuntimeError as error:
            explain_in_place(error, lambda: _run_backward(_called(self._step, batch)))
            raise
        finally:
            # the modules last: the tracer only knows that parameters had no gradients when the run began
            tracer.restore()
            modules.restore()
            set_random_state(self._random)


def _called(step: Step, batch: Sequence[Any]) -> list[Tensor]:
    # a separate function: the search for calling lines ends at the code of this frame
    return [t for t in tree_leaves(step(*batch)) if isinstance(t, Tensor)]


def _run_backward(losses: Sequence[Tensor]) -> None:
    if pending := [loss for loss in losses if loss.requires_grad]:
        torch.autograd.backward(pending, [torch.ones_like(loss) for loss in pending])


def _named(batch: Sequence[Any]) -> Iterator[tuple[Tensor, str]]:
    for i, part in enumerate(batch):
        name = USUAL[i] if len(batch) <= len(USUAL) else f"batch[{i}]"
        tensors = [t for t in tree_leaves(part) if isinstance(t, Tensor)]
        for j, tensor in enumerate(tensors):
            yield tensor, name if len(tensors) == 1 else f"{name}[{j}]"
