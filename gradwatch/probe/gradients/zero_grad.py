"""Look whether anything clears the gradients between two updates: a parameter's own hook sees what is there before."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, final

from torch import Tensor
from torch.autograd import Variable
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gradwatch.probe.device.dtensor import local_part
from gradwatch.probe.device.sync import is_capturing, to_float
from gradwatch.probe.gradients.gradient_sample import LEAST_NUMBERS, GradientSample
from gradwatch.records import Event

KEPT = "gradients-kept"
"""Kind of the event of an update before which nothing was cleared."""

CLEARED = "gradients-cleared"
"""Kind of the event of the first update before which something was."""

KEPT_LATER = "gradients-kept-later"
"""Kind of the event of updates later in the run before which nothing was cleared; its step is that before them."""

LOOKS = 8
"""First updates of each optimizer that are looked at; then the hooks come off."""

EVERY = 10
"""Steps from one later look to the next, at least."""

AGAIN = 3
"""Updates of a later look, all of which must repeat the one before: not once by mistake."""


@final
class Leftovers:
    """Watches two parameters of each optimizer: one for all of them, and one at the other end.

    Between two updates a gradient is first cleared and then added to. One that every backward found as it was is not
    cleared: not before the first backward, not after the update, and, with several optimizers, not in between. A
    gradient that is replaced or written over does not add up either, and one that `torch.autograd.grad` returned was
    added to nothing. The first updates are looked at, and then a few from time to time: a loop may cease to clear, and
    a layer may thaw.

    Args:
        optimizers: Whose parameters. The last trainable one of each, near the output, is the likeliest to be reached;
            one with some elements, by which a gradient is known again.
        note: Called with an event `gradients-kept` at each of the first updates that repeats the one before, once with
            `gradients-cleared` at one that does not, and with `gradients-kept-later` at the end of a later look of
            which all did. Of the first parameter it is told by its name that it was kept, and not that it was cleared.
        names: What the parameters are called.
    """

    def __init__(
        self, optimizers: Iterable[Optimizer], note: Callable[[Event], None], *, names: Mapping[Tensor, str]
    ) -> None:
        self._note, self._names = note, names
        self._next = EVERY
        self._watched = [(optimizer, self._attach(optimizer, since=None)) for optimizer in optimizers]

    def look_again(self, step: int) -> None:
        """Look at the next updates of each optimizer whose last look is over, after an optimizer step."""
        if step < self._next:
            return
        self._next = step + EVERY
        for optimizer, watched in self._watched:
            if all(one.is_over for one in watched):
                _detach(watched)
                watched[:] = self._attach(optimizer, since=step)

    def close(self) -> None:
        """Take all hooks off."""
        for _, watched in self._watched:
            _detach(watched)

    def _attach(self, optimizer: Optimizer, *, since: int | None) -> list[_Watched]:
        first, last = _ends(optimizer)
        watched = [] if last is None else [_Watched(last, self._note, since=since)]
        if first is not None and first is not last and first in self._names:
            watched.append(_Watched(first, self._note, layer=self._names[first], since=since))
        for one in watched:
            one.attach(optimizer)
        return watched


def _detach(watched: Iterable[_Watched]) -> None:
    for one in watched:
        one.detach()


def _ends(optimizer: Optimizer) -> tuple[Tensor | None, Tensor | None]:
    """Return the first and the last parameter that a backward pass may reach, None where there is none."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    wide = [p for p in params if p.numel() >= LEAST_NUMBERS]
    return _first_trainable(params), _first_trainable([*reversed(wide), *reversed(params)])


def _first_trainable(params: Iterable[Tensor]) -> Tensor | None:
    return next((p for p in params if p.requires_grad and p.is_leaf), None)


def _is_zero(grad: Tensor) -> bool:
    """Say whether a gradient, dense or sparse, holds nothing but zeros."""
    values = grad._values() if grad.is_sparse else local_part(grad)
    return not values.numel() or not to_float(values.abs().max())


@final
class _Watched:
    """One parameter: whether its gradient was cleared, or something else was written over it, since the last update.

    Args:
        param: A leaf that requires a gradient.
        note: As above.
        layer: Its name, or None where it stands for all of its optimizer.
        since: Step after which a later look begins, None for the first one.
    """

    def __init__(
        self, param: Tensor, note: Callable[[Event], None], *, layer: str | None = None, since: int | None = None
    ) -> None:
        self._param = param
        self._note, self._layer = note, layer
        self._since = since
        self._left = (LOOKS if since is None else AGAIN) + 1  # the first update begins to count
        self._updates = 0
        self._was_cleared, self._was_replaced, self._was_reached, self._is_told = False, False, False, False
        self._found: tuple[bool, bool] | None = None  # by the backward pass under way: cleared, or replaced
        self._seen: GradientSample | None = None
        self._handles: list[RemovableHandle] = []

    @property
    def is_over(self) -> bool:
        """Whether all updates of this look have been seen."""
        return self._left <= 0

    @property
    def _adds_up(self) -> bool:
        """Whether backward passes since the last update added to the gradient that it had, and to nothing else."""
        return self._was_reached and not self._was_cleared and not self._was_replaced

    def attach(self, optimizer: Optimizer) -> None:
        """Hook the parameter and its optimizer."""
        self._handles = [
            self._param.register_hook(self._before_backward),
            self._param.register_post_accumulate_grad_hook(self._after_backward),
            optimizer.register_step_pre_hook(self._before_update),
            optimizer.register_step_post_hook(self._after_update),
        ]

    def detach(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _before_backward(self, grad: Tensor) -> None:
        if self.is_over:
            self.detach()  # here, since an optimizer must not lose a hook while it calls its hooks
            with contextlib.suppress(RuntimeError):  # a compiled backward may call hooks without the engine
                Variable._execution_engine.queue_callback(self._let_go)
            return
        if is_capturing([grad]):
            return
        old = self._param.grad
        is_cleared = old is None or _is_zero(old.detach())
        self._found = is_cleared, not is_cleared and self._has_changed()

    def _after_backward(self, param: Tensor) -> None:
        """Take what the backward pass found for a fact: it has added to the gradient, and did not only return one."""
        if self._found is None or self.is_over or is_capturing([param]):
            return  # FSDP calls this, too, when it has put a gradient there
        is_cleared, is_replaced = self._found
        self._found, self._was_reached = None, True
        self._was_cleared |= is_cleared
        self._was_replaced |= is_replaced
        self._look()

    def _has_changed(self) -> bool:
        """Say whether something else was written over the gradient since it was looked at."""
        grad = self._param.grad
        return grad is not None and self._seen is not None and not self._seen.is_continued_by(grad)

    def _look(self) -> None:
        grad = self._param.grad
        self._seen = None if grad is None or is_capturing([grad]) else GradientSample(grad)

    def _let_go(self) -> None:
        """Have autograd call a parameter without hooks no more: 1.5 us a backward, and the lock of Python."""
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            hooks = getattr(self._param, name)
            if hooks is not None and not hooks:
                setattr(self._param, name, None)

    def _before_update(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.is_over:
            self._was_replaced |= self._was_reached and self._has_changed()
            self._judge() if self._since is None else self._judge_again(self._since)
        self._was_cleared, self._was_replaced, self._was_reached = False, False, False
        self._updates += 1
        self._left -= 1

    def _after_update(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.is_over:
            self._look()  # behind an optimizer that adds its weight decay to the gradient

    def _judge(self) -> None:
        if self._updates and self._adds_up:
            text = "nothing cleared the gradients since the update before"
            self._note(Event(kind=KEPT, step=self._updates, layer=self._layer, text=text))
        elif self._updates and self._was_cleared and not self._is_told and self._layer is None:
            self._is_told = True
            text = "the gradients were cleared since the update before"
            self._note(Event(kind=CLEARED, step=self._updates, text=text))

    def _judge_again(self, since: int) -> None:
        if self._updates and not self._adds_up:
            self._left = 0
        elif self._updates == AGAIN:
            text = f"nothing clears the gradients between updates any more, from step {since} on"
            self._note(Event(kind=KEPT_LATER, step=since, layer=self._layer, text=text))
