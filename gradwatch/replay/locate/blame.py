"""Attribute a bad operation to its cause: the data, the weights, the number format or the formula."""

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
"""Magnitude above which a weight is too large: weights begin near 1 or below, and stay near it."""
OUTLIER = 100.0
"""Ratio of a sample's magnitude to the median of the other samples above which the sample is an outlier."""


def attribute_cause(located: Located, *, run: TracedStep, step_tracer: StepTracer, batch: Sequence[Any]) -> Located:
    """Return the located operation with its cause.

    The first of these causes that applies is chosen:

    1. A value that was not finite before the step began.
    2. The number format, if the same step is finite in float32.
    3. Samples that are outliers and trigger the failure alone.
    4. Weights that are too large.
    5. The formula.

    Args:
        located: Bad operation without a cause.
        run: The traced step with the bad operation.
        step_tracer: Runs the step again.
        batch: Batch of the step; may be empty.
    """
    if located.leaf:  # no further runs are needed
        return _was_bad(located, located.leaf, batch)
    if any(o.is_half for o in run.operations):
        wide = step_tracer.run(batch, widen=True)
        located = replace(located, runs=located.runs + 1)
        if wide.start is None:
            return _too_small(located, wide)
    located = _bisected(located, step_tracer, batch)
    if located.samples and (reason := _unlike(located.samples, batch)):
        return replace(located, blame=Blame.DATA, because=reason)
    if weight := _out_of_hand(run.operations):
        reason = f"{weight.name} has magnitudes up to {weight.magnitude:.3g}"
        return replace(located, blame=Blame.WEIGHTS, because=reason, weight=weight)
    return replace(located, because=_singular(located))


def _was_bad(located: Located, leaf: Value, batch: Sequence[Any]) -> Located:
    """Attribute a bad operation to a value that was not finite before the step began."""
    reason = f"{leaf.bad:,} of {leaf.size:,} values of {leaf.name or 'a constant'} were NaN or Inf before the step"
    if leaf.origin in ("parameter", "buffer"):
        return replace(located, blame=Blame.WEIGHTS, because=reason, weight=leaf)
    rows = bad_samples.not_finite(batch)
    return replace(located, blame=Blame.DATA, because=reason, samples=rows)


def _too_small(located: Located, wide: TracedStep) -> Located:
    """Attribute a bad operation to its number format, with the magnitude of its output in float32."""
    dtype = next((v.dtype for v in (*located.operation.outputs, *located.operation.inputs)), "half")
    reason = "the same step is finite in float32"
    same = located.operation.index
    # the name is compared too: without casts, the wide step may have other operations at this index
    if same < len(wide.operations) and wide.operations[same].name == located.operation.name:
        largest = max((v.magnitude for v in wide.operations[same].outputs), default=0.0)
        reason += f", with magnitudes up to {largest:.3g} in this output"
    limit = {"float16": "; float16 ends at 65504 and has no numbers between 0 and 6e-8"}.get(dtype, "")
    return replace(located, blame=Blame.FORMAT, because=reason + limit)


def _bisected(located: Located, step_tracer: StepTracer, batch: Sequence[Any]) -> Located:
    """Return the located operation with the samples that trigger it alone."""
    size = bad_samples.count(batch)
    if not size or size == 1:  # a single sample has no other samples to differ from
        return located
    halving = bad_samples.BatchBisection(lambda rows: step_tracer.run(bad_samples.take(batch, rows)).start is not None)
    found = halving.find(size)
    return replace(located, samples=found, runs=located.runs + halving.runs)


def _unlike(rows: Sequence[int], batch: Sequence[Any]) -> str:
    """Describe how these samples differ from the others; empty if they are not outliers."""
    largest_B = bad_samples.magnitudes(batch)
    others = np.delete(largest_B, list(rows)) if len(largest_B) else largest_B
    if not len(others) or len(rows) > len(others):  # a majority cannot be outliers
        return ""
    usual, theirs = float(np.median(others)), float(largest_B[list(rows)].min())
    if not theirs > OUTLIER * usual:
        return ""
    named = ", ".join(str(i) for i in rows)
    which = f"sample {named} alone triggers it and reaches" if len(rows) == 1 else f"samples {named} reach"
    return f"{which} {theirs:.3g} in magnitude; the median of the other samples is {usual:.3g}"


def _out_of_hand(operations: Sequence[Operation]) -> Value | None:
    weights = [v for o in operations for v in o.inputs if v.origin == "parameter"]
    largest = max(weights, key=lambda v: v.magnitude, default=None)
    return largest if largest and largest.magnitude > HUGE else None


def _singular(located: Located) -> str:
    """Describe the inputs for which the operation has no finite result."""
    given = [v for v in located.operation.inputs if v.low == v.low]  # false for nan: integers have no range
    ranges = " and ".join(_range(v) for v in given[:2]) or "its inputs"
    reason = f"data and weights are finite, but {located.operation.name} of {ranges} is not"
    if len(located.samples) == 1:
        reason += f"; sample {located.samples[0]} alone triggers it, and its input looks normal"
    elif 1 < len(located.samples) <= 3:
        named = ", ".join(map(str, located.samples))
        reason += f"; each of the samples {named} triggers it alone, and their inputs look normal"
    return reason


def _range(value: Value) -> str:
    return f"{value.low:.3g}" if value.low == value.high else f"{value.low:.3g} to {value.high:.3g}"
