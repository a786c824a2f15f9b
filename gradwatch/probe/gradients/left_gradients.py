"""Find gradients that the backward pass of another learner leaves in the parameters of a watched optimizer."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from gradwatch.events import GRADIENTS_LEFT
from gradwatch.probe.gradients.gradient_sample import last_write
from gradwatch.probe.gradients.hooked_params import drop_empty_hooks, end_params
from gradwatch.probe.inert_hook import inert_hook, remove_hooks
from gradwatch.records import Event

FIRST_UPDATES = 8
"""Number of first updates of each watched optimizer to check."""

MORE_UPDATES = 32
"""Number of first updates to check once a backward pass has reached another learner: a critic may step more often."""

MAX_CALLS = 512
"""Maximum number of backward passes to check, also if a watched optimizer makes no update."""

MAX_LEARNERS = 16
"""Maximum number of optimizers to follow."""

MAX_EVENTS = 4
"""Maximum number of events of one optimizer."""


@dataclass(eq=False, slots=True)
class _Learner:
    """An optimizer, and the passes that have reached one of its parameters since it was last cleared.

    Attributes:
        optimizer: The optimizer.
        param: Its last trainable parameter: a pass through all of its layers reaches that one first.
        is_watched: Whether the monitor watches the optimizer.
        updates: Number of updates so far.
        passes: Backward passes that added to the gradient of the parameter, oldest first.
        beyond: For each such pass, the learners that it reached afterwards.
        served: Such passes with a learner that has made its update with their gradients.
        written: Address and version of the gradient after the newest pass.
        found: Number of updates that held gradients of another learner.
    """

    optimizer: Optimizer
    param: Tensor
    is_watched: bool
    updates: int = 0
    passes: list[int] = field(default_factory=list)
    beyond: dict[int, set[_Learner]] = field(default_factory=dict)
    served: set[int] = field(default_factory=set)
    written: tuple[int, int] | None = None
    found: int = 0

    def add(self, pass_id: int) -> None:
        """Add a backward pass that has reached the parameter, and is about to add to its gradient."""
        grad = self.param.grad
        # anything written since, such as zeros or a clipped gradient, is not a sum of passes, so no value is read
        if grad is None or self.written != last_write(grad):
            self.passes.clear()
            self.served.clear()
        if pass_id not in self.passes:
            self.passes.append(pass_id)

    def keep(self, param: Tensor) -> None:
        """Remember the gradient after a backward pass has added to it."""
        self.written = None if param.grad is None else last_write(param.grad)

    def serve(self, other: _Learner) -> None:
        """Record that another learner makes its update with the gradients that have passed through this one."""
        self.served.update(pass_id for pass_id in self.passes if other in self.beyond.get(pass_id, ()))

    def conclude(self) -> bool:
        """Return whether the gradient of the update in progress includes another learner's, and begin the next update.

        The newest pass is the learner's own if it reaches no other learner.
        """
        own = self.passes[-1] if self.passes else None
        held = own is not None and own not in self.beyond and bool(self.served)
        self.updates += 1
        self.passes.clear()
        self.beyond.clear()
        self.served.clear()
        return held


@final
class LeftGradients:
    """Follow the first backward passes through the watched parameters, and the updates of all optimizers.

    The loss of a generator, an actor or an attack passes through a discriminator, a critic or a classifier, and leaves
    gradients there. If nothing clears them before the discriminator's own backward pass, its update follows both
    losses, which oppose each other.

    A backward pass is another learner's if it reaches the watched parameter first and a parameter of the learner later,
    the learner makes its update next, and the watched optimizer's own pass reaches no other learner. So none of these
    is reported: several passes per update, heads before a shared trunk, encoders behind a shared head, and a learner
    that steps more often.

    Args:
        optimizers: The watched optimizers. Any other is found by its first update.
        note: Called with an event `gradients-left` at an update that holds gradients of another learner.
    """

    def __init__(self, optimizers: Iterable[Optimizer], note: Callable[[Event], None]) -> None:
        self._note = note
        self._calls = 0
        self._learners: dict[Optimizer, _Learner] = {}
        self._handles: list[RemovableHandle] = []
        for optimizer in optimizers:
            self._follow(optimizer, is_watched=True)
        if self._learners:
            # weak: a hook of all optimizers must not keep a monitor alive
            method = weakref.WeakMethod(self._before_update)

            def before_update(optimizer: Optimizer, *_: Any) -> None:
                if (call := method()) is not None:
                    call(optimizer)

            self._handles.append(register_optimizer_step_pre_hook(inert_hook(before_update)))

    @property
    def _is_over(self) -> bool:
        is_far = any(learner.beyond for learner in self._learners.values()) or len(self._learners) > self._num_watched
        enough = MORE_UPDATES if is_far else FIRST_UPDATES
        watched = (learner for learner in self._learners.values() if learner.is_watched)
        return self._calls >= MAX_CALLS or all(learner.updates >= enough for learner in watched)

    @property
    def _num_watched(self) -> int:
        return sum(learner.is_watched for learner in self._learners.values())

    def find(self, _step: int, /) -> tuple[()]:
        """Return no observation: events are noted at their updates."""
        return ()

    def close(self) -> None:
        """Remove all hooks."""
        remove_hooks(self._handles)

    def _follow(self, optimizer: Optimizer, *, is_watched: bool) -> None:
        """Hook the last parameter of an optimizer that no other learner holds."""
        taken = {learner.param for learner in self._learners.values()}
        param = end_params(optimizer)[1]
        if param is None or param in taken or len(self._learners) >= MAX_LEARNERS:
            return
        learner = self._learners[optimizer] = _Learner(optimizer, param, is_watched)
        self._handles.append(param.register_hook(inert_hook(lambda grad: self._before_backward(learner))))
        if is_watched:
            self._handles.append(param.register_post_accumulate_grad_hook(inert_hook(learner.keep)))

    def _before_backward(self, learner: _Learner) -> None:
        """Record that a backward pass is about to add to the gradient of a learner's parameter."""
        if self._is_over:
            params = [each.param for each in self._learners.values()]
            self.close()  # here, since an optimizer must not lose a hook while it calls its hooks
            with contextlib.suppress(RuntimeError):  # a compiled backward may call hooks without the engine
                for param in params:
                    Variable._execution_engine.queue_callback(partial(drop_empty_hooks, param))
            return
        self._calls += 1
        pass_id = torch._C._current_graph_task_id()
        for other in self._learners.values():
            if other is not learner and other.is_watched and pass_id in other.passes:
                other.beyond.setdefault(pass_id, set()).add(learner)
        if learner.is_watched:
            learner.add(pass_id)

    def _before_update(self, optimizer: Optimizer) -> None:
        """Record an update of any optimizer, and note if it holds gradients of another learner."""
        mine = self._learners.get(optimizer)
        if mine is None:
            self._follow(optimizer, is_watched=False)
            return
        for learner in self._learners.values():
            if learner is not mine:
                learner.serve(mine)
        if mine.is_watched and mine.conclude() and mine.found < MAX_EVENTS:
            mine.found += 1
            self._note(GRADIENTS_LEFT.emit(step=mine.updates - 1))
