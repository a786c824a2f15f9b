"""The step of an instrumented optimizer on a GPU: one launch for the parameters of a group, statistics included.

Held against the native step in Triton's interpreter, and compiled for NVIDIA's sm_90; not yet run on a GPU.
"""

# P = parameters of a launch, C = their chunks, L = columns of the row, S = statistics

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradwatch.optim._triton_kernels import add_changes, step_chunks
from gradwatch.probe.device import triton_kernels as reading
from gradwatch.probe.device.sync import on_device
from gradwatch.probe.device.triton_reduce import cut

MOMENTS = {0: ("momentum_buffer",), 1: ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")}  # by rule, as in the native step


def obstacle(optimizer: Optimizer, rule: int, *, fresh: set[Tensor], may_skip: bool) -> str:
    """Return what keeps an optimizer from being stepped here, or an empty string. Its state must have been made.

    Args:
        optimizer: An instrumented optimizer, on any device.
        rule: 0 for SGD, 1 for Adam.
        fresh: Parameters whose state was made just now.
        may_skip: Whether the device decides if the step is made.
    """
    if may_skip and any(group.get("dampening") and fresh & {*group["params"]} for group in optimizer.param_groups):
        return "the first gradient is not dampened, and a GradScaler may skip the step that sees it"
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for i, param in enumerate(params):
        if param.grad is None:
            continue
        state = optimizer.state.get(param, {})
        alike = [param.grad, *(state[name] for name in MOMENTS[rule] if state.get(name) is not None)]
        if not _is_plain(param) or any(t.layout != torch.strided or not _lies_like(t, param) for t in alike):
            return f"parameter {i}, its gradient or its state is not dense float32, alike, on {params[0].device}"
    return ""


@final
class TritonStep:
    """Steps the parameters of an instrumented optimizer, and writes statistics, as the native step does.

    The host waits for nothing: a GradScaler's scale and skips, and the counts of Adam's steps, are read on the device.
    Addresses are copied there again only if one has changed, so that a step can be captured in a CUDA graph once it
    has run outside of one.

    Args:
        optimizer: The optimizer.
        rule: 0 for SGD, 1 for Adam.
    """

    def __init__(self, optimizer: Optimizer, rule: int) -> None:
        self._optimizer = optimizer
        self._rule = rule

    def run(
        self,
        column_of: Mapping[Tensor, int],
        gradients_SL: Tensor | None,
        changes_2L: Tensor | None,
        *,
        fresh: set[Tensor],
        scale: Tensor | None,
        found_inf: Tensor | None,
        moved: list[Tensor],
    ) -> None:
        """Step every parameter that has a gradient. `obstacle` must have found none.

        Args:
            column_of: Columns of the parameters that are watched.
            gradients_SL: Where the statistics of the gradients go, on the parameters' device; or None.
            changes_2L: Where those of weights and updates go, there too; or None.
            fresh: Parameters whose state was made just now.
            scale: Of the gradients, which are divided by it; or None.
            found_inf: Not 0 where the step is to be skipped; or None.
            moved: Filled with the parameters that were stepped, also where a later group fails.
        """
        for group in self._optimizer.param_groups:
            for is_fresh in (False, True):
                params = [p for p in group["params"] if p.grad is not None and p.numel() and (p in fresh) is is_fresh]
                if params:
                    launch = _Launch(self._optimizer, self._rule, group, params, is_fresh=is_fresh)
                    wanted = (gradients_SL is not None, changes_2L is not None)
                    row_8P = launch.run(scale, found_inf, wanted, moved=moved)
                    _write(row_8P[:6], params, column_of, gradients_SL)
                    _write(row_8P[6:], params, column_of, changes_2L)
            self._count(group["params"], found_inf)
        for param in [p for p in column_of if p.grad is None or not p.numel()]:
            _write_still(param, column_of[param], gradients_SL, changes_2L)

    def _count(self, params: Sequence[Tensor], found_inf: Tensor | None) -> None:
        """Count the step of Adam, once it has been made."""
        states = [self._optimizer.state.get(p, {}) for p in params if p.grad is not None]
        counts = [state["step"] for state in states if "step" in state]
        if counts and found_inf is not None:
            torch._foreach_add_(counts, (found_inf == 0).to(torch.float32).squeeze())
        elif counts:
            torch._foreach_add_(counts, 1)


@final
class _Launch:
    """What one launch steps: parameters of a group that have a gradient."""

    def __init__(
        self, optimizer: Optimizer, rule: int, group: dict[str, Any], params: Sequence[Tensor], *, is_fresh: bool
    ) -> None:
        self._state = optimizer.state
        self._rule = rule
        self._group = group
        self._params = params
        self._is_fresh = is_fresh

    def run(
        self, scale: Tensor | None, found_inf: Tensor | None, wanted: tuple[bool, bool], *, moved: list[Tensor]
    ) -> Tensor:
        """Step, note in `moved` what was, and return the statistics that are wanted, of shape (8, P)."""
        params = self._params
        device, each = params[0].device, (len(params),)
        columns = tuple(range(len(params)))
        numels_P, columns_P, begins_P, tensors_C, offsets_C = cut(tuple(p.numel() for p in params), columns, device)
        num_chunks = len(tensors_C)
        found_CF = torch.empty((num_chunks, reading.FIELDS), dtype=torch.float64, device=device)
        changed_2C = torch.empty((2, num_chunks), dtype=torch.float64, device=device)
        skip = numels_P if found_inf is None else found_inf
        step_chunks[(num_chunks,)](
            on_device(tuple(chain.from_iterable(zip(*map(self._addresses_of, params), strict=True))), device),
            numels_P,
            tensors_C,
            offsets_C,
            len(params),
            found_CF,
            changed_2C,
            num_chunks,
            numels_P if scale is None else scale.to(device, non_blocking=True),
            skip,
            **self._constants(),
            HAS_SCALE=scale is not None,
            MAY_SKIP=found_inf is not None,
            IS_FRESH=self._is_fresh,
            TELLS_GRADIENTS=wanted[0],
            TELLS_CHANGES=wanted[1],
            SIZE=reading.CHUNK,
            NUM_FIELDS=reading.FIELDS,
            enable_fp_fusion=False,  # what is fused says so
        )
        moved += params  # after any later failure, they must not be stepped again
        row_8P = torch.full((8, len(params)), math.nan, dtype=torch.float32, device=device)
        if wanted[0]:
            tables = (found_CF, begins_P, numels_P, columns_P, row_8P[:6], len(params), 1.0)
            reading.add_chunks[each](*tables, SIZE=reading.CHUNK, NUM_FIELDS=reading.FIELDS, AT_ONCE=reading.ABREAST)
        if wanted[1]:
            found = (changed_2C, num_chunks, begins_P, columns_P, row_8P[6:], len(params), skip)
            add_changes[each](*found, MAY_SKIP=found_inf is not None, AT_ONCE=reading.ABREAST)
        return row_8P

    def _addresses_of(self, param: Tensor) -> Iterator[int]:
        """Yield where weight, gradient, moments and count of a parameter are; 0 for what there is not."""
        assert param.grad is not None, "only what has a gradient is stepped"
        yield param.data_ptr()
        yield param.grad.data_ptr()
        state = self._state.get(param, {})
        for name in (*(*MOMENTS[self._rule], "", "")[:3], "step"):
            held = state.get(name)
            yield 0 if held is None else held.data_ptr()

    def _constants(self) -> dict[str, Any]:
        """Return what the step needs besides, by the names of the kernel's arguments."""
        group = self._group
        rate, decay = float(group["lr"]), float(group["weight_decay"])
        is_adam = self._rule == 1
        is_coupled = decay != 0 and not group.get("decoupled_weight_decay", False)
        if is_adam:
            beta1, beta2 = map(float, group["betas"])
            logs = {"log_first": _log2(beta1), "log_second": _log2(beta2)}
            numbers = {"first": 1 - beta1, "second": beta2, "third": 1 - beta2, "eps": float(group["eps"]), **logs}
        else:
            numbers = {"first": float(group["momentum"]), "second": 1 - group["dampening"], "third": rate, "eps": 0.0}
            numbers |= {"log_first": 0.0, "log_second": 0.0}
        return {
            **numbers,
            "rate": rate,
            "sign": -1.0 if group["maximize"] else 1.0,
            "decay": decay,
            "keep": 1 - rate * decay if is_adam and not is_coupled else 1.0,
            "IS_ADAM": is_adam,
            "IS_COUPLED": is_coupled,
            "IS_AMSGRAD": bool(group.get("amsgrad", False)),
            "IS_NESTEROV": bool(group.get("nesterov", False)),
            "HAS_MOMENTUM": bool(group.get("momentum", 0)),
        }


def _log2(beta: float) -> float:
    return math.log2(beta) if beta > 0 else -math.inf


def _write(read_SP: Tensor, params: Sequence[Tensor], column_of: Mapping[Tensor, int], out_SL: Tensor | None) -> None:
    """Put the columns of the parameters that are watched where they belong."""
    if out_SL is None:
        return
    watched = [i for i, param in enumerate(params) if param in column_of]
    if len(watched) < len(params):
        read_SP = read_SP.index_select(1, on_device(tuple(watched), read_SP.device))
    columns = tuple(column_of[params[i]] for i in watched)
    out_SL.index_copy_(1, on_device(columns, out_SL.device), read_SP)


def _write_still(param: Tensor, column: int, gradients_SL: Tensor | None, changes_2L: Tensor | None) -> None:
    """Write what there is to say of a parameter that was not moved."""
    if gradients_SL is not None:
        gradients_SL[:, column].fill_(math.nan)
        if param.grad is not None:
            for statistic in (0, 1, 5):
                gradients_SL[statistic, column].fill_(0.0)
    if changes_2L is not None:
        norm = param.detach().norm()
        changes_2L[0, column].copy_(norm)
        changes_2L[1, column].copy_(torch.where(norm > 0, 0.0, math.nan))


def _is_plain(param: Tensor) -> bool:
    is_dense = param.is_contiguous() or (param.dim() == 4 and param.is_contiguous(memory_format=torch.channels_last))
    return param.dtype == torch.float32 and is_dense


def _lies_like(tensor: Tensor, param: Tensor) -> bool:
    same = (param.dtype, param.device, param.shape)
    return (tensor.dtype, tensor.device, tensor.shape) == same and tensor.stride() == param.stride()
