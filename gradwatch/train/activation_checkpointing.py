"""Trade memory for time: drop activations in the forward pass and recompute them in the backward pass."""

from __future__ import annotations

import contextlib
import fnmatch
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from gradwatch.config.sections.train import BlocksSection
from gradwatch.errors import GradwatchError
from gradwatch.train.blocks import outermost_containers

Save = Literal["nothing", "matmuls"]
"""The tensors that a recomputed module keeps in addition to its input."""
aten = torch.ops.aten
MATMULS = [
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.convolution.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
]
"""Operations whose outputs `save: matmuls` keeps: their time grows faster than the size of their outputs."""


def recompute(model: nn.Module, choice: BlocksSection | Literal["none", "sqrt"]) -> None:
    """Recompute the parts of a model that a config chooses, in place.

    For a training, the plan has replaced a budget with a choice by now. A model built for another purpose keeps all.
    """
    if choice == "none":
        return
    if choice == "sqrt":
        sqrt_blocks(model)
    elif choice.every is not None:
        every_blocks(model, choice.every, save=choice.save)
    elif choice.modules is not None:
        matching_modules(model, choice.modules, save=choice.save)


def every_blocks(model: nn.Module, k: int, *, save: Save = "nothing") -> int:
    """Keep only the input of every k-th block. Blocks are the children of the model's outermost containers.

    The last segment keeps its activations: its backward pass comes first, when all others are still dropped.

    Args:
        model: Changed in place; its parameters keep their names.
        k: Blocks between two kept inputs.
        save: The tensors that recomputed segments keep in addition to their inputs.

    Returns:
        Number of recomputed segments.

    Raises:
        GradwatchError: The model has no blocks, or the blocks cannot be grouped.
    """
    containers = list(outermost_containers(model))
    if not containers:
        raise GradwatchError(
            "train.activation_checkpointing: the model has no nn.Sequential or nn.ModuleList whose children could be "
            "its blocks; name them: activation_checkpointing: {modules: ['encoder.layer*']}"
        )
    recomputed = sum(_segment(container, k, is_last=container is containers[-1], save=save) for container in containers)
    if not recomputed:
        raise GradwatchError(
            f"train.activation_checkpointing.every: got {k}, but the model has {len(containers[-1])} blocks: one "
            "segment, which would be recomputed for nothing; use a smaller number"
        )
    return recomputed


def sqrt_blocks(model: nn.Module) -> int:
    """Recompute segments of sqrt(n) blocks, which needs the least memory. Source: arXiv:1604.06174, section 4.1."""
    # all containers together are one chain of n blocks; each is still cut into segments separately
    return every_blocks(model, sqrt_length(sum(len(container) for container in outermost_containers(model))))


def sqrt_length(num_blocks: int) -> int:
    """Return the blocks of a segment of sqrt(n) blocks, rounded."""
    return max(1, round(math.sqrt(num_blocks)))


def matching_modules(model: nn.Module, patterns: Sequence[str], *, save: Save = "nothing") -> int:
    """Recompute the modules with names that match a pattern (`blocks.*`), and return their number.

    A matching module inside another match is recomputed with the outer module.

    Args:
        model: Changed in place.
        patterns: Patterns of names.
        save: The tensors that recomputed modules keep in addition to their inputs.
    """
    names = [n for n, _ in model.named_modules() if n and any(fnmatch.fnmatchcase(n, p) for p in patterns)]
    outer = [n for n in names if not any(n.startswith(f"{other}.") for other in names)]
    if not outer:
        known = ", ".join(n for n, _ in model.named_children())
        raise GradwatchError(
            f"train.activation_checkpointing.modules: {list(patterns)} match no module; the model has {known}"
        )
    for name in outer:
        _recompute(model.get_submodule(name), save=save)
    return len(outer)


def _segment(container: nn.Sequential | nn.ModuleList, k: int, *, is_last: bool, save: Save) -> int:
    blocks = list(container)
    if isinstance(container, nn.ModuleList):
        # the model calls the items of a ModuleList itself, so only single blocks can be wrapped
        if k > 1:
            raise GradwatchError(
                f"train.activation_checkpointing: every {k} blocks needs an nn.Sequential, and the model keeps its "
                "blocks in an nn.ModuleList, which it may call in any order; use {every: 1}"
            )
        recomputed = blocks[:-1] if is_last else blocks
        for block in recomputed:
            _recompute(block, save=save)
        return len(recomputed)
    segments = [nn.Sequential(*blocks[i : i + k]) for i in range(0, len(blocks), k)]
    for segment in segments[:-1] if is_last else segments:
        _recompute(segment, mode_of=container, save=save)  # not a submodule, so model.train() does not reach it

    def forward(x: Any) -> Any:
        for segment in segments:
            x = segment(x)
        return x

    # on the instance, not by new submodules: names and hooks of the container stay
    container.forward = forward  # type: ignore[method-assign]  # the forward of this instance alone
    return len(segments) - is_last


def _recompute(module: nn.Module, *, save: Save, mode_of: nn.Module | None = None) -> None:
    """Make a module recompute its activations. Only `forward` changes; names, hooks and weights stay."""
    mode_of = mode_of or module
    plain = module.forward
    norms = [m for m in module.modules() if isinstance(m, _BatchNorm)]

    def contexts() -> tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]:
        # one context for the forward pass, one for the recomputation
        if save == "nothing":
            return contextlib.nullcontext(), _statistics_untouched(norms)
        keeping, reading = create_selective_checkpoint_contexts(MATMULS)
        return keeping, _both(_statistics_untouched(norms), reading)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not (mode_of.training and torch.is_grad_enabled()):
            return plain(*args, **kwargs)  # without a backward pass there is nothing to recompute
        if torch.compiler.is_compiling():  # the compiler recomputes the graph without its side effects
            return checkpoint(plain, *args, use_reentrant=False, **kwargs)
        return checkpoint(plain, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    module.forward = forward


@contextlib.contextmanager
def _both(
    first: contextlib.AbstractContextManager[Any], second: contextlib.AbstractContextManager[Any]
) -> Iterator[None]:
    with first, second:
        yield


@contextlib.contextmanager
def _statistics_untouched(norms: Sequence[_BatchNorm]) -> Iterator[None]:
    """Restore the running statistics after a recomputation, which updates them a second time."""
    buffers = [(buffer, buffer.clone()) for norm in norms for buffer in norm.buffers()]
    try:
        yield
    finally:
        for buffer, before in buffers:
            buffer.data.copy_(before)  # through .data: autograd must not count it as a change of a saved tensor
