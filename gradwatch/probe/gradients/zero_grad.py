"""Check that gradients are cleared between two updates, by hooks on a few parameters."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, final

import numpy as np
from torch import Tensor
from torch.autograd import Variable
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gradwatch.events import GRADIENTS_KEPT, GRADIENTS_KEPT_LATER, UNHELD_KEPT
from gradwatch.probe.device.dtensor import local_part
from gradwatch.probe.device.sync import HostTransfer, is_capturing
from gradwatch.probe.gradients.gradient_sample import MIN_NUMBERS, GradientSample, is_continued
from gradwatch.probe.gradients.hooked_params import drop_empty_hooks, end_params, first_trainable
from gradwatch.probe.inert_hook import inert_hook, remove_hooks
from gradwatch.records import Event

FIRST_UPDATES = 8
"""Number of first updates of each optimizer to check; then the hooks are removed."""

CHECK_EVERY_STEPS = 10
"""Minimum steps between two later checks, which alone find a loop that stops clearing."""

LATER_UPDATES = 3
"""Updates of a later check. All of them must repeat the one before, since a single repeat may be a mistake."""


@final
class ZeroGradCheck:
    """Watch two parameters of each optimizer: the last one on behalf of all parameters, and the first one.

    Between two updates a loop clears a gradient, and then a backward pass adds to it. If every backward pass finds the
    gradient unchanged, the loop clears it neither before the first backward nor after the update, nor between several
    optimizers. A gradient that is replaced or overwritten does not add up. A result of `torch.autograd.grad` is not
    accumulated. The first updates are checked, and then a few from time to time: a loop may clear in its first epoch
    only, and a layer may thaw.

    Args:
        optimizers: The watched optimizers. The last trainable parameter, near the output, is the likeliest to be
            reached. It must have a few elements, to recognize its gradient.
        note: Called with an event `gradients-kept` at each of the first updates that repeats the one before, and once
            with `gradients-kept-later` after a later check with repeats only. Events of the first parameter carry its
            name.
        names: Names of the parameters.
    """

    def __init__(
        self, optimizers: Iterable[Optimizer], note: Callable[[Event], None], *, names: Mapping[Tensor, str]
    ) -> None:
        self._note, self._names = note, names
        self._next = CHECK_EVERY_STEPS
        self._watched = [(optimizer, self._attach(optimizer, since=None)) for optimizer in optimizers]
        self._unheld = self._attach_unheld([optimizer for optimizer, _ in self._watched])

    def find(self, step: int, /) -> tuple[()]:
        """Check the next updates of each optimizer after an optimizer step, if its last check is over.

        Returns:
            No observation: events are noted at their updates.
        """
        for one in self._all():
            one.settle()
        if step < self._next:
            return ()
        self._next = step + CHECK_EVERY_STEPS
        for optimizer, watched in self._watched:
            # a check continues until its optimizer has made enough updates, however many steps that takes
            if all(one.is_settled for one in watched):
                _detach(watched)
                watched[:] = self._attach(optimizer, since=step)
        return ()

    def close(self) -> None:
        """Remove all hooks, and conclude the checks in progress."""
        for one in self._all():
            one.settle(wait=True)
        _detach(self._all())

    def _all(self) -> list[_GradientWatch]:
        return [one for watched in (self._unheld, *(watched for _, watched in self._watched)) for one in watched]

    def _attach_unheld(self, optimizers: Sequence[Optimizer]) -> list[_GradientWatch]:
        """Watch one parameter that no optimizer holds: the call that clears gradients may leave it out."""
        held = {p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        param = first_trainable([p for p in reversed([*self._names]) if p not in held and p.numel() >= MIN_NUMBERS])
        if param is None or not held:
            return []
        watch = _GradientWatch(param, self._note, layer=self._names[param], is_held=False)
        watch.attach(optimizers[0])
        return [watch]

    def _attach(self, optimizer: Optimizer, *, since: int | None) -> list[_GradientWatch]:
        first, last = end_params(optimizer)
        watched = [] if last is None else [_GradientWatch(last, self._note, since=since)]
        if first is not None and first is not last and first in self._names:
            watched.append(_GradientWatch(first, self._note, layer=self._names[first], since=since))
        for one in watched:
            one.attach(optimizer)
        return watched


def _detach(watched: Iterable[_GradientWatch]) -> None:
    for one in watched:
        one.detach()


def _largest(grad: Tensor) -> Tensor | None:
    """Return the largest magnitude of a gradient, on its device; None if it has no values."""
    values = grad._values() if grad.is_sparse else local_part(grad)
    return values.abs().max() if values.numel() else None


class _Moment(NamedTuple):
    """The state of a gradient before a backward pass adds to it, or before an update.

    Args:
        largest: Largest magnitude, or None if there is no gradient. A gradient of zeros is cleared.
        numbers_2N: Numbers at the moment before and now, or None if nothing has written to the gradient.
        is_backward: Whether a backward pass follows.
    """

    largest: Tensor | None
    numbers_2N: Tensor | None
    is_backward: bool


class _Update(NamedTuple):
    """The moments up to an update, in transfer to the host.

    Args:
        number: Number of updates before it.
        moments: The moments.
        values: Their values by the index of the moment and the name of the field; None if there are none.
    """

    number: int
    moments: list[_Moment]
    values: HostTransfer | None


@final
class _GradientWatch:
    """Check whether the gradient of one parameter was cleared or overwritten since the last update.

    Args:
        param: A leaf that requires a gradient.
        note: As for `ZeroGradCheck`.
        layer: Name of the parameter, or None if it represents all parameters of its optimizer.
        since: Step that a later check begins after, or None for the first check.
        is_held: Whether an optimizer holds the parameter.
    """

    def __init__(
        self,
        param: Tensor,
        note: Callable[[Event], None],
        *,
        layer: str | None = None,
        since: int | None = None,
        is_held: bool = True,
    ) -> None:
        self._param = param
        self._is_held = is_held
        self._note, self._layer = note, layer
        self._since = since
        # one more: the first update has no earlier one to compare with
        self._remaining = (FIRST_UPDATES if since is None else LATER_UPDATES) + 1
        self._updates = 0
        self._found: _Moment | None = None  # before the current backward pass
        self._moments: list[_Moment] = []  # since the last update
        self._pending: deque[_Update] = deque()
        self._seen: GradientSample | None = None
        self._handles: list[RemovableHandle] = []

    @property
    def is_over(self) -> bool:
        """Return whether all updates of this check are done."""
        return self._remaining <= 0

    @property
    def is_settled(self) -> bool:
        """Return whether all updates of this check are done and judged."""
        return self.is_over and not self._pending

    def attach(self, optimizer: Optimizer) -> None:
        """Hook the parameter and its optimizer."""
        self._handles = [
            self._param.register_hook(inert_hook(self._before_backward)),
            self._param.register_post_accumulate_grad_hook(inert_hook(self._after_backward)),
            optimizer.register_step_pre_hook(self._before_update),
        ]
        self._is_hooked = False

    def detach(self) -> None:
        """Remove the hooks."""
        remove_hooks(self._handles)

    def _before_backward(self, grad: Tensor) -> None:
        if self.is_over:
            self.detach()  # here, since an optimizer must not lose a hook while it calls its hooks
            with contextlib.suppress(RuntimeError):  # a compiled backward may call hooks without the engine
                Variable._execution_engine.queue_callback(lambda: drop_empty_hooks(self._param))
            return
        if is_capturing([grad]):  # reading a value would break the capture
            return
        old = self._param.grad
        self._found = _Moment(None if old is None else _largest(old.detach()), self._numbers(), is_backward=True)

    def _after_backward(self, param: Tensor) -> None:
        """Record the state that the backward pass found, once it has added to the gradient."""
        if self._found is None or self.is_over or is_capturing([param]):
            return  # FSDP also calls this after it has stored a gradient
        self._moments.append(self._found)
        self._found = None
        self._sample()

    def _numbers(self) -> Tensor | None:
        """Return the numbers that show whether the gradient was overwritten since it was sampled."""
        grad = self._param.grad
        return None if grad is None or self._seen is None else self._seen.numbers_with(grad)

    def _sample(self) -> None:
        grad = self._param.grad
        self._seen = None if grad is None or is_capturing([grad]) else GradientSample(grad)

    def _before_update(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.is_over:
            if not self._is_hooked:
                # here, since a hook of the loop may call the monitor while torch iterates over those after an update
                self._handles.append(optimizer.register_step_post_hook(self._after_update))
                self._is_hooked = True
            if self._moments:  # a loop may also overwrite the gradient between its last backward and the update
                self._moments.append(_Moment(None, self._numbers(), is_backward=False))
            values = {
                f"{i}.{name}": value
                for i, moment in enumerate(self._moments)
                for name, value in (("largest", moment.largest), ("numbers", moment.numbers_2N))
                if value is not None
            }
            self._pending.append(_Update(self._updates, self._moments, HostTransfer(values) if values else None))
            self.settle()
        self._moments = []
        self._updates += 1
        self._remaining -= 1

    def settle(self, *, wait: bool = False) -> None:
        """Judge the updates whose values have arrived, in order.

        Args:
            wait: Whether to wait for all values in flight.
        """
        while self._pending:
            sent = self._pending[0].values
            if sent is not None and not (wait or sent.is_ready):
                return
            update, values = self._pending.popleft(), {} if sent is None else sent.values()
            was_cleared = was_replaced = False
            for i, moment in enumerate(update.moments):
                # NaN is not 0, so a gradient with NaN is not cleared
                is_cleared = moment.is_backward and not values.get(f"{i}.largest", np.zeros(())).any()
                was_cleared |= is_cleared
                was_replaced |= (
                    not is_cleared and moment.numbers_2N is not None and not is_continued(values[f"{i}.numbers"])
                )
            # whether backward passes since the last update only added to the earlier gradient
            adds_up = bool(update.moments) and not was_cleared and not was_replaced
            if self._since is None:
                self._report(update.number, adds_up=adds_up)
            else:
                self._report_later(update.number, self._since, adds_up=adds_up)

    def _end(self) -> None:
        self._remaining = 0
        self._pending.clear()

    def _after_update(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.is_over:
            self._sample()  # after an optimizer that adds its weight decay to the gradient

    def _report(self, updates: int, *, adds_up: bool) -> None:
        if not self._is_held:
            if updates and not adds_up:
                self._end()
            elif updates == LATER_UPDATES:
                self._note(UNHELD_KEPT.emit(step=updates, layer=self._layer, parameter=self._layer))
        elif updates and adds_up:
            self._note(GRADIENTS_KEPT.emit(step=updates, layer=self._layer))

    def _report_later(self, updates: int, since: int, *, adds_up: bool) -> None:
        if updates and not adds_up:
            self._end()  # a single cleared gradient ends the check
        elif updates == LATER_UPDATES:
            self._note(GRADIENTS_KEPT_LATER.emit(step=since, layer=self._layer, since=since))
