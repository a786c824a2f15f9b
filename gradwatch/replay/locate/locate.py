"""Locate the first bad operation of a step: the line that calls it, the chain that leads to it, and the blame."""

from __future__ import annotations

from typing import Any

from torch import nn

from gradwatch.replay.locate.bad_operation import Located
from gradwatch.replay.locate.blame import attribute_cause
from gradwatch.replay.locate.nan_origin import jumps, upstream
from gradwatch.replay.locate.records import Operation
from gradwatch.replay.locate.step_tracer import Step, StepTracer, TracedStep

JUMP = 1e6
"""Factor by which one operation may raise the largest magnitude: beyond it, a sum over a million equal values."""


def locate(step: Step, *batch: Any, model: nn.Module | None = None, jump: float = JUMP) -> Located | None:
    """Run a step, forward and backward, and return its first bad operation, or None where there is none.

    The step runs once with every operation traced, and some more times to attribute the blame. Gradients, buffers of
    modules and random
    generators are put back afterwards. It must not move the weights: leave the optimizer out of it.

    Args:
        step: Called with the batch; returns the loss, whose backward pass is then run, unless the step has run it.
        batch: Tensors with one sample per index of their first dimension. With them, bad samples are found too.
        model: Whose weights the step uses; found by itself where a module is called.
        jump: Factor by which the largest magnitude may grow in one operation before that is named, where all is finite.
    """
    step_tracer = StepTracer(step, model=model)
    run = step_tracer.run(batch)
    found = run.start
    if found is None:
        jumped = next(jumps(run.operations, jump), None)
        return None if jumped is None else _located(run, jumped, because=_grown(jumped), is_jump=True)
    located = _located(run, found.operation, leaf=found.leaf, reaches=run.reaches)
    return attribute_cause(located, run=run, step_tracer=step_tracer, batch=batch)


def _located(run: TracedStep, operation: Operation, **known: Any) -> Located:
    """Return what is known of an operation before blame is attributed."""
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
