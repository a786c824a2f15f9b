"""Choose the parameters to hook for following backward passes, and clean up after removed hooks."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.optim import Optimizer

from gradwatch.probe.gradients.gradient_sample import MIN_NUMBERS


def end_params(optimizer: Optimizer) -> tuple[Tensor | None, Tensor | None]:
    """Return the first and the last parameter that a backward pass may reach, or None."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    # few numbers cannot distinguish a scaled gradient from an overwritten one, so small parameters come last
    wide = [p for p in params if p.numel() >= MIN_NUMBERS]
    return first_trainable(params), first_trainable([*reversed(wide), *reversed(params)])


def first_trainable(params: Iterable[Tensor]) -> Tensor | None:
    return next((p for p in params if p.requires_grad and p.is_leaf), None)


def drop_empty_hooks(param: Tensor) -> None:
    """Remove the empty collections that removed hooks leave behind."""
    # autograd would call even empty hooks: 1.5 us per backward, and the GIL
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(param, name)
        if hooks is not None and not hooks:
            setattr(param, name, None)
