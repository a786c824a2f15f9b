"""The step of a watched optimizer on a GPU: one launch for the parameters of a group, statistics included.

Held against the native step in Triton's interpreter, and compiled for NVIDIA's sm_90; not yet run on a GPU.
"""

# P = parameters of a launch, C = their chunks, L = columns of the row, S = statistics

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradwatch.optim._triton_kernels import add_changes, step_chunks
from gradwatch.probe import _triton_kernels as reading
from gradwatch.probe._triton import cut
from gradwatch.probe.transfer import to_float, to_host

MOMENTS = {0: ("momentum_buffer",), 1: ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")}  # by rule, as in the native step


def obstacle(optimizer: Optimizer, rule: int) -> str:
    """Return what keeps an optimizer from being stepped here, or an empty string. Its state must have been made.

    Args:
        optimizer: A watched optimizer, on any device.
        rule: 0 for SGD, 1 for Adam.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for i, param in enumerate(params):
        if param.grad is None:
            continue
        state = optimizer.state.get(param, {})
        alike = [param.grad, *(state[name] for name in MOMENTS[rule] if state.get(name) is not None)]
        if not _is_plain(param) or any(t.layout != torch.strided or not _lies_like(t, param) for t in alike):
            return f"parameter {i}, its gradient or its state is not dense float32, alike, on {params[0].device}"
    return ""


def step(
    optimizer: Optimizer,
    rule: int,
    column_of: Mapping[Tensor, int],
    gradients_SL: Tensor | None,
    changes_2L: Tensor | None,
    *,
    fresh: set[Tensor],
    scale: Tensor | None,
    moved: list[Tensor],
) -> None:
    """Step every parameter that has a gradient, and write statistics, as the native step does.

    Args:
        optimizer: Without obstacle.
        rule: 0 for SGD, 1 for Adam.
        column_of: Columns of the parameters that are watched.
        gradients_SL: Where the statistics of the gradients go, on the CPU; or None.
        changes_2L: Where those of weights and updates go, on the CPU; or None.
        fresh: Parameters whose state was made just now.
        scale: Of the gradients, which are divided by it; or None.
        moved: Filled with the parameters that moved, also where a later group fails.
    """
    for group in optimizer.param_groups:
        for is_fresh in (False, True):
            params = [p for p in group["params"] if p.grad is not None and p.numel() and (p in fresh) is is_fresh]
            if params:
                wanted = (gradients_SL is not None, changes_2L is not None)
                row_8P = _launch(optimizer, rule, group, params, wanted, is_fresh=is_fresh, scale=scale)
                _write(row_8P[:6], params, column_of, gradients_SL)
                _write(row_8P[6:], params, column_of, changes_2L)
                moved += params
        _count(optimizer, group["params"])
    still = [p for p in column_of if p.grad is None or not p.numel()]
    for param in still:
        _write_still(param, column_of[param], gradients_SL, changes_2L)


def _count(optimizer: Optimizer, params: Sequence[Tensor]) -> None:
    """Count the step of Adam, once it has been made."""
    states = [optimizer.state.get(p, {}) for p in params if p.grad is not None]
    counts = [state["step"] for state in states if "step" in state]
    if counts:
        torch._foreach_add_(counts, 1)


def _launch(
    optimizer: Optimizer,
    rule: int,
    group: dict[str, Any],
    params: Sequence[Tensor],
    wanted: tuple[bool, bool],
    *,
    is_fresh: bool,
    scale: Tensor | None,
) -> Tensor:
    device = params[0].device
    numels_P, columns_P, begins_P, tensors_C, offsets_C = cut(
        tuple(p.numel() for p in params), tuple(range(len(params))), device
    )
    num_chunks = len(tensors_C)
    steps_2P, constants = _constants(optimizer, rule, group, params)
    found_CF = torch.empty((num_chunks, reading.FIELDS), dtype=torch.float64, device=device)
    changed_2C = torch.empty((2, num_chunks), dtype=torch.float64, device=device)
    step_chunks[(num_chunks,)](
        _to(device, _addresses(optimizer, rule, params)),
        numels_P,
        tensors_C,
        offsets_C,
        _to(device, steps_2P),
        len(params),
        found_CF,
        changed_2C,
        num_chunks,
        numels_P if scale is None else scale.to(device, non_blocking=True),
        **constants,
        HAS_SCALE=scale is not None,
        IS_FRESH=is_fresh,
        TELLS_GRADIENTS=wanted[0],
        TELLS_CHANGES=wanted[1],
        SIZE=reading.CHUNK,
        NUM_FIELDS=reading.FIELDS,
        enable_fp_fusion=False,  # what is fused says so
    )
    row_8P = torch.full((8, len(params)), math.nan, dtype=torch.float32, device=device)
    each = (len(params),)
    if wanted[0]:
        tables = (found_CF, begins_P, numels_P, columns_P, row_8P[:6], len(params), 1.0)
        reading.add_chunks[each](*tables, SIZE=reading.CHUNK, NUM_FIELDS=reading.FIELDS, AT_ONCE=reading.ABREAST)
    if wanted[1]:
        add_changes[each](changed_2C, num_chunks, begins_P, columns_P, row_8P[6:], len(params), AT_ONCE=reading.ABREAST)
    return row_8P


def _addresses(optimizer: Optimizer, rule: int, params: Sequence[Tensor]) -> Tensor:
    """Return where weights, gradients and moments are, of shape (5, P); 0 for what there is not."""

    def of(param: Tensor) -> Iterator[int]:
        assert param.grad is not None, "only what has a gradient is stepped"
        yield param.data_ptr()
        yield param.grad.data_ptr()
        state = optimizer.state.get(param, {})
        for name in (*MOMENTS[rule], "", "")[:3]:
            moment = state.get(name)
            yield 0 if moment is None else moment.data_ptr()

    return torch.tensor([[*of(p)] for p in params], dtype=torch.int64, device="cpu").t().contiguous()


def _constants(
    optimizer: Optimizer, rule: int, group: dict[str, Any], params: Sequence[Tensor]
) -> tuple[Tensor, dict[str, Any]]:
    """Return what a step needs of each parameter, and of them all."""
    steps_2P = torch.ones((2, len(params)), dtype=torch.float32, device="cpu")
    rate, decay = float(group["lr"]), float(group["weight_decay"])
    is_adam = rule == 1
    is_coupled = decay != 0 and not group.get("decoupled_weight_decay", False)
    if is_adam:
        beta1, beta2 = map(float, group["betas"])
        for i, param in enumerate(params):
            count = to_float(optimizer.state[param]["step"]) + 1
            steps_2P[0, i] = rate / (1 - beta1**count)
            steps_2P[1, i] = math.sqrt(1 - beta2**count)
        numbers = {"first": 1 - beta1, "second": beta2, "third": 1 - beta2, "eps": float(group["eps"])}
    else:
        numbers = {"first": float(group["momentum"]), "second": 1 - group["dampening"], "third": rate, "eps": 0.0}
    return steps_2P, {
        **numbers,
        "sign": -1.0 if group["maximize"] else 1.0,
        "decay": decay,
        "keep": 1 - rate * decay if is_adam and not is_coupled else 1.0,
        "IS_ADAM": is_adam,
        "IS_COUPLED": is_coupled,
        "IS_AMSGRAD": bool(group.get("amsgrad", False)),
        "IS_NESTEROV": bool(group.get("nesterov", False)),
        "HAS_MOMENTUM": bool(group.get("momentum", 0)),
    }


def _write(read_SP: Tensor, params: Sequence[Tensor], column_of: Mapping[Tensor, int], out_SL: Tensor | None) -> None:
    if out_SL is None:
        return
    read = torch.from_numpy(to_host(read_SP))
    for i, param in enumerate(params):
        if param in column_of:
            out_SL[:, column_of[param]] = read[:, i]


def _write_still(param: Tensor, column: int, gradients_SL: Tensor | None, changes_2L: Tensor | None) -> None:
    """Write what there is to say of a parameter that was not moved."""
    if gradients_SL is not None:
        gradients_SL[:, column] = math.nan
        if param.grad is not None:
            gradients_SL[[0, 1, 5], column] = 0.0
    if changes_2L is not None:
        norm = to_float(param.detach().norm())
        changes_2L[:, column] = torch.tensor([norm, 0.0 if norm > 0 else math.nan], device="cpu")


def _to(device: torch.device, table: Tensor) -> Tensor:
    """Return a table of the host's on the device; the host does not wait for the copy."""
    return (table.pin_memory() if device.type == "cuda" else table).to(device, non_blocking=True)


def _is_plain(param: Tensor) -> bool:
    is_dense = param.is_contiguous() or (param.dim() == 4 and param.is_contiguous(memory_format=torch.channels_last))
    return param.dtype == torch.float32 and is_dense


def _lies_like(tensor: Tensor, param: Tensor) -> bool:
    same = (param.dtype, param.device, param.shape)
    return (tensor.dtype, tensor.device, tensor.shape) == same and tensor.stride() == param.stride()
