"""Whose fault it is: the data's, the weights', the format's, or the formula's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gradwatch.replay.locate import bad_samples
from gradwatch.replay.locate.bad_operation import Blame, Located
from gradwatch.replay.locate.records import Operation, Value
from gradwatch.replay.locate.step_tracer import StepTracer, TracedStep

HUGE = 1e6
"""Magnitude of a weight beyond which it is out of hand: weights begin near 1 or below, and stay near."""
OUTLIER = 100.0
"""How many times the median magnitude of the samples one must have to be unlike them."""


def attribute_cause(located: Located, *, run: TracedStep, step_tracer: StepTracer, batch: Sequence[Any]) -> Located:
    """Return the located operation with its blame attributed.

    In this order: what was bad before the step began is to blame; then the format, where the same step is finite in
    float32; then samples unlike the others that do it alone; then weights that are out of hand; then the formula.

    Args:
        located: Without blame.
        run: The step in which it was located.
        step_tracer: Runs that step again.
        batch: What it ran on; may be empty.
    """
    if located.leaf:
        return _was_bad(located, located.leaf, batch)
    if any(o.is_half for o in run.operations):
        wide = step_tracer.run(batch, widen=True)
        located = replace(located, runs=located.runs + 1)
        if wide.start is None:
            return _too_small(located, wide)
    located = _bisected(located, step_tracer, batch)
    if located.samples and (told := _unlike(located.samples, batch)):
        return replace(located, blame=Blame.DATA, because=told)
    if weight := _out_of_hand(run.operations):
        told = f"{weight.name} has magnitudes up to {weight.magnitude:.3g}"
        return replace(located, blame=Blame.WEIGHTS, because=told, weight=weight)
    return replace(located, because=_singular(located))


def _was_bad(located: Located, leaf: Value, batch: Sequence[Any]) -> Located:
    """Attribute a value that was not finite before the step began."""
    told = f"{leaf.bad:,} of {leaf.size:,} values of {leaf.name or 'a constant'} were NaN or Inf before the step"
    if leaf.origin in ("parameter", "buffer"):
        return replace(located, blame=Blame.WEIGHTS, because=told, weight=leaf)
    rows = bad_samples.not_finite(batch)
    return replace(located, blame=Blame.DATA, because=told, samples=rows)


def _too_small(located: Located, wide: TracedStep) -> Located:
    """Attribute a value that is finite in float32; say how large it is there."""
    dtype = next((v.dtype for v in (*located.operation.outputs, *located.operation.inputs)), "half")
    told = "the same step is finite in float32"
    same = located.operation.index
    if same < len(wide.operations) and wide.operations[same].name == located.operation.name:
        largest = max((v.magnitude for v in wide.operations[same].outputs), default=0.0)
        told += f", with magnitudes up to {largest:.3g} in this output"
    limit = {"float16": "; float16 ends at 65504 and has no numbers between 0 and 6e-8"}.get(dtype, "")
    return replace(located, blame=Blame.FORMAT, because=told + limit)


def _bisected(located: Located, step_tracer: StepTracer, batch: Sequence[Any]) -> Located:
    """Return it with the samples that do it alone."""
    size = bad_samples.count(batch)
    if not size or size == 1:
        return located
    halving = bad_samples.BatchBisection(lambda rows: step_tracer.run(bad_samples.take(batch, rows)).start is not None)
    found = halving.find(size)
    return replace(located, samples=found, runs=located.runs + halving.runs)


def _unlike(rows: Sequence[int], batch: Sequence[Any]) -> str:
    """Return in what these samples are unlike the others, or an empty string."""
    largest_B = bad_samples.magnitudes(batch)
    others = np.delete(largest_B, list(rows)) if len(largest_B) else largest_B
    if not len(others) or len(rows) > len(others):
        return ""
    usual, theirs = float(np.median(others)), float(largest_B[list(rows)].min())
    if not theirs > OUTLIER * usual:
        return ""
    named = ", ".join(str(i) for i in rows)
    which = f"sample {named} alone triggers it and reaches" if len(rows) == 1 else f"samples {named} reach"
    return f"{which} {theirs:.3g} in magnitude, the median of the other samples is {usual:.3g}"


def _out_of_hand(operations: Sequence[Operation]) -> Value | None:
    """Return the weight of largest magnitude, where that is out of hand."""
    weights = [v for o in operations for v in o.inputs if v.origin == "parameter"]
    largest = max(weights, key=lambda v: v.magnitude, default=None)
    return largest if largest and largest.magnitude > HUGE else None


def _singular(located: Located) -> str:
    """Return what the operation was given that it has no finite result for."""
    given = [v for v in located.operation.inputs if v.low == v.low]
    ranges = " and ".join(_range(v) for v in given[:2]) or "its inputs"
    told = f"data and weights are finite, but {located.operation.name} of {ranges} is not"
    if located.samples and len(located.samples) <= 3:
        told += f"; sample {', '.join(map(str, located.samples))} alone triggers it; its input looks normal"
    return told


def _range(value: Value) -> str:
    return f"{value.low:.3g}" if value.low == value.high else f"{value.low:.3g} to {value.high:.3g}"
