"""Build AdamW with moments in 8 bits, by torchao, with a state of plain tensors."""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.optim import Optimizer

from gradwatch.errors import GradwatchError
from gradwatch.render.packages import installation

PACKAGE = "torchao"


def build(
    params: Iterable[Any],
    *,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    amsgrad: bool = False,
    block_size: int = 256,
) -> Optimizer:
    """Build AdamW with moments in 8 bits, of tensors with at least 4,096 numbers; its update is compiled.

    Args:
        params: Parameters, or param groups.
        lr: Learning rate.
        betas: Decay of the two moments.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled weight decay.
        amsgrad: Use the maximum of all second moments so far.
        block_size: Numbers that share a scale. A tensor whose size it does not divide keeps its moments in float32.

    Raises:
        GradwatchError: The package torchao is not installed.
    """
    if command := installation(PACKAGE):
        raise GradwatchError(f"optim.name: adamw8bit needs the package {PACKAGE}, which is not installed; {command}")
    # torchao registers an enumeration that recent versions of torch know by themselves, and they log it
    is_quiet = _replaced(logging.getLogger("torch.utils._pytree"), "disabled", True)
    with is_quiet, unset_fake_temporarily():  # the tables of the codes have values, even if the weights have none
        states = importlib.import_module("torchao.optim.subclass_8bit")
        states.get_qmap_signed(), states.get_qmap_unsigned()
        optimizers = importlib.import_module("torchao.optim")
    optimizer: Optimizer = optimizers.AdamW8bit(
        params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad, block_size=block_size
    )
    optimizer.register_state_dict_post_hook(_with_plain_moments)
    optimizer.register_load_state_dict_pre_hook(_with_packed_moments)
    return optimizer


def is_compiled(optimizer: Optimizer) -> bool:
    """Return whether the update of an optimizer is compiled, as `build` compiles it."""
    return type(optimizer).__module__ == "torchao.optim.adam"


@contextlib.contextmanager
def uncompiled_update(optimizer: Optimizer) -> Iterator[None]:
    """Replace a compiled update by what it takes, since it shows no operations; another optimizer is left as it is."""
    if not is_compiled(optimizer):
        yield
        return
    module = importlib.import_module("torchao.optim.adam")
    with torch.compiler.set_stance("force_eager"), _replaced(module, "single_param_adam", _take_new_moments):
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute in a `with` block, and set it back."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _take_new_moments(weight: Tensor, *_: Any) -> None:
    # measured on a CPU: the kernel writes both new moments in float32 before it encodes them
    moments = [torch.empty_like(weight, dtype=torch.float32) for _ in range(2)]
    del moments


def _with_plain_moments(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state with the tensors inside of each 8-bit moment; the table of its codes is a constant."""

    def plain(value: Any) -> Any:
        if not hasattr(value, "codes"):
            return value
        return {"codes": value.codes, "scale": value.scale, "signed": value.signed}

    values = {index: {name: plain(v) for name, v in held.items()} for index, held in state["state"].items()}
    return {**state, "state": values}


def _with_packed_moments(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state with the 8-bit moments that `_with_plain_moments` took apart."""
    module = importlib.import_module("torchao.optim.subclass_8bit")

    def packed(value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        table = module.get_qmap_signed() if value["signed"] else module.get_qmap_unsigned()
        codes = torch.tensor(table, dtype=torch.float32, device=value["codes"].device)
        return module.OptimState8bit(value["codes"], value["scale"], codes, value["signed"], dtype=torch.float32)

    values = {index: {name: packed(v) for name, v in held.items()} for index, held in state["state"].items()}
    return {**state, "state": values}
