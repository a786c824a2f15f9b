"""Look whether anything clears the gradients between two updates: a parameter's own hook sees what is there before."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, final

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gradwatch.probe.transfer import to_float
from gradwatch.records import Event

KEPT = "gradients-kept"
"""Kind of the event of an update before which nothing was cleared."""

CLEARED = "gradients-cleared"
"""Kind of the event of the first update before which something was."""

LOOKS = 8
"""First updates of each optimizer that are looked at; then the hooks come off."""


def watch_leftovers(
    optimizers: Iterable[Optimizer], note: Callable[[Event], None], *, names: Mapping[Tensor, str]
) -> list[RemovableHandle]:
    """Watch two parameters of each optimizer over its first updates: one for all of them, and one at the other end.

    Between two updates a gradient is first cleared and then added to. One that every backward found as it was is not
    cleared: not before the first backward, not after the update, and, with several optimizers, not in between.

    Args:
        optimizers: Whose parameters. The last trainable one of each, near the output, is the likeliest to be reached.
        note: Called with an event `gradients-kept` at each update that repeats the one before, and once with
            `gradients-cleared` at one that does not. Of the first parameter it is told by its name that it was kept,
            and not that it was cleared.
        names: What the parameters are called.

    Returns:
        The hooks, for whoever wants them off earlier.
    """
    handles: list[RemovableHandle] = []
    for optimizer in optimizers:
        if params := _trainable(optimizer):
            handles += _Watched(params[-1], note).attach(optimizer)
            if len(params) > 1 and params[0] in names:
                handles += _Watched(params[0], note, layer=names[params[0]]).attach(optimizer)
    return handles


def _trainable(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad and p.is_leaf]


def _is_zero(grad: Tensor) -> bool:
    """Say whether a gradient, dense or sparse, holds nothing but zeros."""
    values = grad._values() if grad.is_sparse else grad
    return not values.numel() or not to_float(values.abs().max())


@final
class _Watched:
    """One parameter: whether it was cleared since the last update.

    Args:
        param: A leaf that requires a gradient.
        note: As above.
        layer: Its name, or None where it stands for all of its optimizer.
    """

    def __init__(self, param: Tensor, note: Callable[[Event], None], *, layer: str | None = None) -> None:
        self._param = param
        self._note, self._layer = note, layer
        self._updates = 0
        self._was_cleared, self._was_reached, self._is_told = False, False, False
        self._handles: list[RemovableHandle] = []

    def attach(self, optimizer: Optimizer) -> list[RemovableHandle]:
        """Hook the parameter and its optimizer, and return the hooks."""
        self._handles = [
            self._param.register_hook(self._before_backward),
            optimizer.register_step_pre_hook(self._before_update),
        ]
        return self._handles

    def _before_backward(self, grad: Tensor) -> None:
        if self._updates > LOOKS:
            for handle in self._handles:  # here, since an optimizer must not lose a hook while it calls its hooks
                handle.remove()
            return
        old = self._param.grad
        self._was_cleared |= old is None or _is_zero(old.detach())
        self._was_reached = True

    def _before_update(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._updates and self._was_reached and not self._was_cleared:
            text = "nothing cleared the gradients since the update before"
            self._note(Event(kind=KEPT, step=self._updates, layer=self._layer, text=text))
        elif self._updates and self._was_reached and not self._is_told and self._layer is None:
            self._is_told = True
            text = "the gradients were cleared since the update before"
            self._note(Event(kind=CLEARED, step=self._updates, text=text))
        self._was_cleared, self._was_reached = False, False
        self._updates += 1
