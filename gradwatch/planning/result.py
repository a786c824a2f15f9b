"""Hold the memory of a training step: its peak, its parts, and a row for each module."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, final

from gradwatch.records import plain_fields

Shapes = tuple[tuple[int, ...], ...]
FLOPS_PER_BYTE = {"cuda": 100.0}
"""Operations that a type of device makes in the time in which it moves a byte, by order of magnitude."""
HOST_BYTE = 80.0
"""Bytes of its memory that a GPU reads in the time of one byte over its link to the host: 2e12 and 25e9 a second."""


def work(flops: float, moved_bytes: float, device: str) -> float:
    """Return the work of a device in operations: matrix products, plus the memory traffic of all others."""
    return flops + FLOPS_PER_BYTE.get(device, 10.0) * moved_bytes


@final
@dataclass(slots=True, kw_only=True)
class ModuleRow:
    """The work and memory of one module in the passes of one micro-batch, including its submodules.

    Args:
        name: Name in the model; empty for the model itself.
        type: Name of its class.
        inputs: Shapes of the tensors that it takes, at its first call.
        outputs: Shapes of the tensors that it returns.
        parameters: Numbers in its parameters.
        saved_bytes: Bytes that the graph keeps for its backward pass, each storage counted where it is saved first.
        saved_tensors: Tensors that the graph keeps.
        saved_views: Of these, tensors in a storage that is kept anyway: a view, an input saved before, or a weight.
        input_bytes: Bytes of the inputs that nothing else has saved. They stay if the module is recomputed.
        flops: Floating-point operations of its forward pass: together with `moved_bytes`, the cost of recomputing the
            module.
        moved_bytes: Bytes that its other operations read and write in its forward pass.
        forward_ms: Time of its forward pass; nan if the step was traced without data.
        backward_ms: Time of its backward pass, as `forward_ms`.
        order: Number of its first call among the calls of all modules; -1 if it was not called.
        is_repeatable: Whether it was called once, with distinct tensors, and left its inputs unchanged.
    """

    name: str
    type: str
    inputs: Shapes = ()
    outputs: Shapes = ()
    parameters: int = 0
    saved_bytes: int = 0
    saved_tensors: int = 0
    saved_views: int = 0
    input_bytes: int = 0
    flops: int = 0
    moved_bytes: int = 0
    forward_ms: float = math.nan
    backward_ms: float = math.nan
    order: int = -1
    is_repeatable: bool = True

    def to_json(self) -> dict[str, Any]:
        """Return the row as plain data; a time that was not measured is null."""
        return {key: value for key, value in plain_fields(self).items() if key not in ("order", "is_repeatable")}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputation:
    """A choice of the activations that a step recomputes in its backward pass instead of keeping them.

    Args:
        name: `optimal`: the modules that cost least, by dynamic programming. `sqrt` and `every`: segments of blocks.
            `save-matmuls`: the blocks, but for their matrix products.
        text: The choice in words.
        setting: The choice as `train.activation_checkpointing` of a config takes it, such as `{"modules": [...]}`.
        peak_bytes: Peak of the step with it.
        saved_bytes: Bytes by which the peak falls.
        extra_work: Additional work of the step, relative to its work without the choice.
        fits: Whether the peak is within the budget.
    """

    name: str
    text: str
    setting: Any
    peak_bytes: int
    saved_bytes: int
    extra_work: float
    fits: bool


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The memory of one training step, in the state that the second and every later step begins with.

    Args:
        peak_bytes: Largest sum of the bytes of all live tensors on the device, over the whole step.
        parameters: Numbers in the parameters, each shared one counted once.
        parts: Largest bytes of `weights`, `gradients`, `optimizer`, `activations` (saved for the backward pass),
            `temporaries` and `buffers`. They are not largest at the same time, so their sum may exceed the peak.
        modules: A row for each module, in the order of the model.
        at_peak: Bytes of each part at the peak; their sum is the peak.
        phase: Phase of the peak: `forward`, `loss`, `backward` or `update`.
        flops: Floating-point operations of the whole step.
        moved_bytes: Bytes that its other operations read and write.
        host_bytes: Bytes that move between the device and the host.
        device: Type of the device that is counted.
        is_traced: Whether the step was traced without data, not run.
        notes: Sentences on what the plan leaves out.
        shared_peaks: Peaks for the requested fractions of the parts.
        recomputations: Choices of modules to recompute for the requested budget, those that fit and cost least first.
    """

    peak_bytes: int
    parameters: int
    parts: dict[str, int]
    modules: tuple[ModuleRow, ...]
    at_peak: dict[str, int]
    phase: str
    flops: int
    moved_bytes: int
    device: str
    is_traced: bool
    host_bytes: int = 0
    notes: tuple[str, ...] = field(default=())
    shared_peaks: tuple[float, ...] = field(default=())
    recomputations: tuple[Recomputation, ...] = field(default=())

    @property
    def work(self) -> float:
        """Return the work of the step in operations, by which steps are compared."""
        return work(self.flops, self.moved_bytes + HOST_BYTE * self.host_bytes, self.device)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain data."""
        return {
            "peak_bytes": self.peak_bytes,
            "parameters": self.parameters,
            "parts": self.parts,
            "modules": [row.to_json() for row in self.modules],
        }
