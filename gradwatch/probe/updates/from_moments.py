"""Measure how far a stock optimizer moved each weight, from the moments after its step and without a copy."""

# L = parameter tensors

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradwatch.probe.device import backend as kernels
from gradwatch.probe.device.dtensor import is_distributed
from gradwatch.probe.device.sync import to_float

RULES: dict[type[Optimizer], int] = {torch.optim.SGD: 0, torch.optim.Adam: 1, torch.optim.AdamW: 1}
"""Optimizers with steps that can be traced, and their numbers in the C extension. Subclasses may step differently."""

_OTHER_PARAMS = -3  # an answer of the C extension: the parameters or their order have changed


@final
class MomentUpdateProbe:
    """Measure weight norms and update/weight ratios from the moments of SGD with momentum, Adam and AdamW.

    The probe computes the update again from the moments and subtracts it from the weight. Rounded to float32, the
    result is the weight before the step, except for the last bit if the step rounded near a tie. A weight below 2^-22
    of its update counts as zero. Compared with a copy of the weights, the norm has a relative error of at most 1e-6
    plus 2^-21 of the update's norm. The ratio has a relative error of at most 1e-4 plus 2^-22, unless the update is a
    million times the weight.

    Plain SGD and Nesterov momentum use the gradient, which a loop may have cleared after the step. They need a copy,
    and so do unusual settings.

    Args:
        params: Parameters in the order of the columns.
        optimizer: The optimizer that moves them.
    """

    def __init__(self, params: Sequence[Tensor], optimizer: Optimizer) -> None:
        self._native = kernels.select_backend()
        self._rule = RULES.get(type(optimizer))
        if self._native is None or not all(_is_plain(p) for p in params):
            self._rule = None
        self._optimizer = optimizer
        self._column_of = {p: i for i, p in enumerate(params)}
        self._groups: list[dict[str, Any]] = []
        self._held: list[int] = []
        self._others: list[Tensor] = []
        self._moved = b""
        self._ordered: tuple[Tensor, ...] = ()
        self._columns_P = torch.zeros(0, dtype=torch.int32, device="cpu")

    def before(self) -> bool:
        """Prepare for the next step, and return whether it can be traced afterwards."""
        if self._rule is None:
            return False
        self._groups = [*_snapshots(self._optimizer)]
        if not all(_is_traceable(group) for group in self._groups):
            return False
        held = [p for group in self._groups for p in group["params"]]
        ids = [*map(id, held)]  # comparing tensors would compare their elements
        if ids != self._held:
            self._held, own = ids, set(held)
            self._others = [p for p in self._column_of if p not in own]
        if self._others:
            # parameters outside the optimizer have a norm to measure, too; as they do not move, any settings will do
            self._groups.append({**self._groups[0], "params": self._others})
        self._moved = bytes([p.grad is not None for p in held]) + bytes(len(self._others))
        return True

    def after(self) -> Tensor | None:
        """Measure the step that was made since `before`.

        Returns:
            As `CopyUpdateProbe.after`. None if the optimizer's state is not as expected; afterwards `before` returns
            False.
        """
        assert self._native is not None, "called only if `before` returned true"
        row_2L = torch.full((2, len(self._column_of)), math.nan, dtype=torch.float32, device="cpu")
        # twice: if the parameters changed, the first answer asks for their new order
        for _ in range(2):
            answer = self._native.traces(
                self._rule,
                self._groups,
                self._optimizer.state,
                self._moved,
                self._ordered,
                self._columns_P,
                row_2L,
                torch.get_num_threads(),
            )
            if answer == -1:
                return row_2L
            if answer != _OTHER_PARAMS:
                break
            self._ordered = tuple(p for group in self._groups for p in group["params"])
            columns = [self._column_of.get(p, -1) for p in self._ordered]
            self._columns_P = torch.tensor(columns, dtype=torch.int32, device="cpu")
        self._rule = None  # give up for the rest of the run: the state has an unknown form
        return None


def _snapshots(optimizer: Optimizer) -> Iterator[dict[str, Any]]:
    """Yield copies of the groups: a schedule may change the rate before the step is measured."""
    decay = {"decoupled_weight_decay": type(optimizer) is torch.optim.AdamW}  # groups lack it before torch 2.7
    for group in optimizer.param_groups:
        rate = group["lr"]
        yield {**decay, **group, "lr": to_float(rate) if isinstance(rate, Tensor) else rate}


def _is_traceable(group: dict[str, Any]) -> bool:
    if group.get("capturable") or group.get("differentiable"):
        return False  # they compute in another order
    if "momentum" in group:
        return bool(group["momentum"] > 0 and not group["nesterov"])
    return bool(group["lr"] * group["weight_decay"] < 0.5)  # beyond, the weight barely depends on the previous one


def _is_plain(param: Tensor) -> bool:
    is_whole = not is_distributed(param)  # native code reads no other kind
    return is_whole and param.dtype == torch.float32 and param.device.type == "cpu" and param.layout == torch.strided
