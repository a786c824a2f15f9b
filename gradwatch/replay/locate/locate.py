"""Locate the first bad operation of a step, with its line, the chain of operations before it, and the cause."""

from __future__ import annotations

from typing import Any

from torch import nn

from gradwatch.replay.locate.bad_operation import Located
from gradwatch.replay.locate.blame import attribute_cause
from gradwatch.replay.locate.nan_origin import jumps, upstream
from gradwatch.replay.locate.records import Operation
from gradwatch.replay.locate.step_tracer import Step, StepTracer, TracedStep

JUMP = 1e6
"""Maximum growth of the largest magnitude in one operation: the growth of a sum over a million equal values."""


def locate(step: Step, *batch: Any, model: nn.Module | None = None, jump: float = JUMP) -> Located | None:
    """Run the forward and backward pass of a step, and return its first bad operation.

    The step runs once with every operation traced, and several more times to find the cause. Gradients, buffers of
    modules and random generators are restored afterwards. The step must not update the weights: leave the optimizer
    step out.

    Args:
        step: Function of the batch that returns the loss. Its backward pass is run afterwards, unless the step ran it.
        batch: Tensors with one sample per index of the first dimension. With a batch, bad samples are found too.
        model: Model that the step uses. If None, the modules that the step calls are used.
        jump: Factor by which the largest magnitude may grow in one operation. If all values are finite, the first
            operation above this factor is returned.

    Returns:
        The first bad operation, or None if there is none.

    Raises:
        RuntimeError: The step raises it. If the backward pass met a tensor that was changed in place, a note names the
            line that saved the tensor and the line that wrote to it.
    """
    step_tracer = StepTracer(step, model=model)
    run = step_tracer.run(batch)
    found = run.start
    if found is None:  # all finite: a jump in magnitude may still be worth reporting
        jumped = next(jumps(run.operations, jump), None)
        return None if jumped is None else _located(run, jumped, because=_grown(jumped), is_jump=True)
    located = _located(run, found.operation, leaf=found.leaf, reaches=run.reaches)
    return attribute_cause(located, run=run, step_tracer=step_tracer, batch=batch)


def _located(run: TracedStep, operation: Operation, **known: Any) -> Located:
    """Describe an operation without its cause."""
    return Located(
        operation=operation,
        forward=run.forward_of(operation),
        chain=tuple(upstream(run.operations, operation)),
        followed=len(run.operations),
        **known,
    )


def _grown(operation: Operation) -> str:
    given = max(v.magnitude for v in operation.inputs)
    got = max(v.magnitude for v in operation.outputs)
    turns = f"{operation.name} turns magnitudes of {given:.3g} into {got:.3g}"
    return f"every value is finite, but {turns}: it is nearly singular"
