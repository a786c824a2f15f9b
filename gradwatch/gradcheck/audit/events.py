"""Define the events of a step: passes, scalings, clips, updates and schedules, with the tensors around each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, final

from torch import Tensor

from gradwatch.probe.place import NOWHERE, Place

EventKind = Literal["start", "backward", "zero", "unscale", "clip", "update", "no-update", "schedule", "end"]


@final
@dataclass(frozen=True, slots=True)
class TensorCopies:
    """Copies of the gradients, dense, and of the weights of all watched tensors."""

    grads: tuple[Tensor | None, ...]
    weights: tuple[Tensor, ...]


@final
@dataclass(slots=True)
class LossCall:
    """A call that reduces to one number: a loss function, or a mean or sum of all elements.

    Args:
        is_loss: Whether it is a loss function of torch, and not only a mean or a sum.
        reduction: mean or sum.
        count: Elements or targets over which it reduces; the sum of their weights if they have any.
        grads: Derivative of the differentiated value by the output of the call; one for each backward pass.
    """

    is_loss: bool
    reduction: str
    count: float
    grads: list[float] = field(default_factory=list)


@final
@dataclass(frozen=True, slots=True)
class InputMemory:
    """The memory of an input of the model, which identifies micro-batches of one batch."""

    storage: int
    begin: int
    end: int


@final
@dataclass(slots=True, kw_only=True, eq=False)  # an event is itself: tensors have no truth value
class StepEvent:
    """One event of a step.

    Args:
        kind: Kind of the event.
        before: The tensors before it.
        after: The tensors after it.
        place: The statement in the user's code.
        losses: Of a backward pass: the calls that reduced to a loss since the last one.
        parts: Of a backward pass: inputs of the forward passes since the last one.
        loss: Of a backward pass: the sum of the values that it began at.
        scale: Of a backward pass: the scale of the loss; of an unscaling: the scale that is divided by.
        terms: Of a backward pass: for each watched tensor, the gradients that single operations gave to it.
        watched: Of a clip, an update or an unscaling: indices of the tensors it was called for.
        limit: Of a clip: its arguments.
        begin: Of an update: number of events before it began; passes after that are of its closure.
        groups: Of an update: the param groups before it.
        state: Of an update: copy of the state of each watched tensor before it.
        owner: The optimizer or scheduler.
    """

    kind: EventKind
    before: TensorCopies
    after: TensorCopies
    place: Place = NOWHERE
    losses: list[LossCall] = field(default_factory=list)
    parts: list[InputMemory] = field(default_factory=list)
    loss: float = 0.0
    scale: float = 1.0
    terms: dict[int, list[Tensor]] = field(default_factory=dict)
    watched: tuple[int, ...] = ()
    limit: dict[str, Any] = field(default_factory=dict)
    begin: int = 0
    groups: list[dict[str, Any]] = field(default_factory=list)
    state: dict[int, dict[str, Any]] = field(default_factory=dict)
    owner: Any = None
