"""Run a step any number of times from the same state, every operation followed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gradwatch.replay.locate.module_stack import ModuleStack
from gradwatch.replay.locate.nan_origin import NanOrigin, find_origin
from gradwatch.replay.locate.op_tracer import OpTracer, uncompiled
from gradwatch.replay.locate.records import Operation, Value
from gradwatch.state.rng import random_state, set_random_state

Step = Callable[..., Any]
USUAL = ("inputs", "targets")
"""What the parts of a batch are called; where there are more, they are counted."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """A step that was run.

    Args:
        operations: In the order in which they ran.
        losses: What the step returned.
    """

    operations: Sequence[Operation]
    losses: tuple[Value, ...]

    @property
    def start(self) -> NanOrigin | None:
        """Where what is not finite began, or None where neither loss nor gradients are touched."""
        return find_origin(self.operations, self._sinks())

    @property
    def reaches(self) -> tuple[str, ...]:
        """What it harms: the loss, or the parameters whose gradients it spoils."""
        if any(v.bad for v in self.losses):
            return ("the loss",)
        return tuple(dict.fromkeys(o.leaf for o in self.operations if o.leaf and any(v.bad for v in o.inputs)))

    def forward_of(self, operation: Operation) -> Operation | None:
        """Return the operation of the forward pass that one of the backward pass belongs to."""
        return None if operation.forward is None else self.operations[operation.forward]

    def _sinks(self) -> list[Value]:
        """Return what was harmed: the loss, or else gradients of parameters, or else what came out last."""
        bad = [v for v in self.losses if v.bad]
        bad = bad or [v for o in self.operations if o.leaf for v in o.inputs if v.bad]
        if bad or self.losses:
            return bad
        return [v for o in self.operations[-1:] for v in o.outputs]


@final
class StepTracer:
    """Runs a step from the state in which it is made.

    Args:
        step: Called with a batch; returns the loss, or None.
        model: Whose weights it uses, or None to find out.
    """

    def __init__(self, step: Step, *, model: nn.Module | None = None) -> None:
        self._step = step
        self._model = model
        self._random = random_state()

    def run(self, batch: Sequence[Any], *, widen: bool = False) -> TracedStep:
        """Follow the step on a batch, in float32 where it should be wide, and leave everything as it was."""
        modules = ModuleStack(self._model)
        for tensor, name in _named(batch):
            modules.name(tensor, name, "input")
        tracer = OpTracer(modules, within=_called.__code__, widen=widen)
        set_random_state(self._random)
        try:
            with modules, uncompiled(), torch.enable_grad(), tracer:
                losses = _called(self._step, batch)
                pending = [loss for loss in losses if loss.requires_grad]
                if pending and not any(o.leaf for o in tracer.operations):
                    torch.autograd.backward(pending, [torch.ones_like(loss) for loss in pending])
            return TracedStep(operations=tracer.operations, losses=tuple(tracer.value(loss) for loss in losses))
        finally:
            tracer.restore()
            modules.restore()
            set_random_state(self._random)


def _called(step: Step, batch: Sequence[Any]) -> list[Tensor]:
    """Run the step; this code is where the search for calling lines ends."""
    return [t for t in tree_leaves(step(*batch)) if isinstance(t, Tensor)]


def _named(batch: Sequence[Any]) -> Iterator[tuple[Tensor, str]]:
    for i, part in enumerate(batch):
        name = USUAL[i] if len(batch) <= len(USUAL) else f"batch[{i}]"
        tensors = [t for t in tree_leaves(part) if isinstance(t, Tensor)]
        for j, tensor in enumerate(tensors):
            yield tensor, name if len(tensors) == 1 else f"{name}[{j}]"
