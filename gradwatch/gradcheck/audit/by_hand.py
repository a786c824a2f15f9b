"""Recognize updates that the loop makes by hand: gradients times a factor, or plus a multiple of the weights."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from gradwatch.gradcheck.audit.events import StepEvent
from gradwatch.gradcheck.audit.windows import Window
from gradwatch.gradcheck.stepping.tensors import norm
from gradwatch.probe.device.sync import to_float

TOLERANCE = 1e-4
"""Relative difference from an exact multiple, for the least precise sums of float32."""
ROUNDING_ULPS = 64
"""Largest change of a gradient by rounding, in units in the last place."""


@final
@dataclass(frozen=True, slots=True)
class HandChange:
    """A change of all gradients between two events.

    Args:
        after: The event before it.
        factor: The factor by which the gradients were multiplied, or nan.
        decay: The multiple of the weights that was added, or nan.
    """

    after: StepEvent
    factor: float = math.nan
    decay: float = math.nan


def gradient_changes(window: Window, held: Sequence[int]) -> list[HandChange]:
    """Return the changes of gradients by hand in a window, from its first pass on."""
    if window.has_closure:
        return []
    found = []
    started = False
    for event, later in itertools.pairwise([*window.events, window.update]):
        started = started or event.kind == "backward"
        change = _gradient_change(event, later, held) if started else None
        if change is not None:
            found.append(change)
    return found


def _gradient_change(event: StepEvent, later: StepEvent, held: Sequence[int]) -> HandChange | None:
    pairs = [(i, event.after.grads[i], later.before.grads[i]) for i in held]
    known = [(i, a, b) for i, a, b in pairs if a is not None and b is not None and a.shape == b.shape]
    if all(torch.equal(a, b) for _, a, b in known):
        return None
    before, after = flat([a for _, a, _ in known]), flat([b for _, _, b in known])
    rounding = ROUNDING_ULPS * max(torch.finfo(a.dtype).eps for _, a, _ in known) * norm(before)
    weights = flat([event.after.weights[i] for i, _, _ in known])
    decay = multiple(after - before, weights, noise=rounding)  # first: a small decay barely changes the gradient
    if math.isfinite(decay):
        return HandChange(event, decay=decay)
    return HandChange(event, factor=multiple(after, before))


def multiple(vector: Tensor, of: Tensor, *, noise: float = 0.0) -> float:
    """Return the factor if a vector is a multiple of another one, else nan.

    Args:
        vector: float64, flat; at least 2 elements.
        of: The other vector, of the same size.
        noise: Length below which a vector counts as zero.
    """
    square = to_float(of @ of)
    if vector.numel() < 2 or not square or not math.isfinite(square) or norm(vector) <= noise:
        return math.nan
    factor = to_float(vector @ of) / square
    is_multiple = norm(vector - factor * of) <= TOLERANCE * norm(vector) + noise / ROUNDING_ULPS
    return factor if is_multiple and factor else math.nan


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors as one flat vector in float64."""
    return torch.cat([t.detach().double().reshape(-1) for t in tensors]) if tensors else torch.zeros(0).double()
