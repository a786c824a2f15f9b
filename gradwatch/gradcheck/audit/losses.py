"""Record each call that reduces to one number, and the factor with which a backward pass differentiates it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from gradwatch.gradcheck.audit.events import LossCall
from gradwatch.probe.device.sync import to_float

LOSSES = {
    getattr(functional, name)
    for name in dir(functional)
    if (name.endswith("_loss") or "cross_entropy" in name or name == "kl_div") and not name.startswith("_")
}
REDUCTIONS = {torch.mean: "mean", Tensor.mean: "mean", torch.sum: "sum", Tensor.sum: "sum"}


@final
class LossCalls(TorchFunctionMode):
    """Collects the calls that reduce to one number while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[LossCall] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        is_loss = func in LOSSES
        if (is_loss or func in REDUCTIONS) and isinstance(result, Tensor) and result.dim() == 0 and result.grad_fn:
            call = _loss_call(func, args, kwargs) if is_loss else _reduction(func, args, kwargs)
            if call is not None:
                self.calls.append(call)
                result.register_hook(lambda grad: call.grads.append(to_float(grad)))
        return result


def _reduction(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> LossCall | None:
    reduced = args[0] if args else kwargs.get("input")
    return LossCall(False, REDUCTIONS[func], reduced.numel()) if isinstance(reduced, Tensor) else None


def _loss_call(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> LossCall | None:
    try:
        bound = inspect.signature(func).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return None
    bound.apply_defaults()
    given = bound.arguments
    reduction = str(given.get("reduction", "mean"))
    count = _count(func, given)
    if reduction == "batchmean":  # of kl_div
        first = next(iter(given.values()))
        reduction, count = "mean", float(first.shape[0]) if first.dim() else 1.0
    if reduction not in ("mean", "sum") or not math.isfinite(count):
        return None
    return LossCall(True, reduction, count)


def _count(func: Any, given: Mapping[str, Any]) -> float:
    """Return the number of targets, or their total weight: what the mean of a loss function divides by."""
    first = next(iter(given.values()))
    target = given.get("target")
    if func not in (functional.cross_entropy, functional.nll_loss) or not isinstance(target, Tensor):
        return float(first.numel())
    if target.is_floating_point():  # probabilities of the classes
        return float(first.numel() / first.shape[1 if first.dim() > 1 else 0])
    counted = target[target != given["ignore_index"]]
    weight = given.get("weight")
    return to_float(weight[counted].sum()) if isinstance(weight, Tensor) else float(counted.numel())
