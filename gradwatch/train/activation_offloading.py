"""Trade transfers for memory: keep the saved tensors of the forward pass in host memory until the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from gradwatch.probe.nested import storage_id

HOST_IS_DEVICE = ("cpu", "mps")
"""Devices that compute in host memory, where there is nothing to move."""


def in_host_memory(model: nn.Module, device: torch.device) -> saved_tensors_hooks:
    """Return a context of the forward pass that keeps its saved tensors in host memory, page-locked for CUDA.

    Args:
        model: Its weights stay on the device, which holds them anyway.
        device: Device of the training.
    """
    host = save_on_cpu(pin_memory=device.type == "cuda")
    return except_weights(model, host.pack_hook, host.unpack_hook)


def except_weights(
    model: nn.Module, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]
) -> saved_tensors_hooks:
    """Return a context that packs each saved tensor, except those in the storage of a weight."""
    weights = {storage_id(parameter) for parameter in model.parameters()}

    def pack_others(tensor: Tensor) -> Any:
        return tensor if storage_id(tensor) in weights else pack(tensor)

    def unpack_others(packed: Any) -> Tensor:
        return packed if isinstance(packed, Tensor) else unpack(packed)

    return saved_tensors_hooks(pack_others, unpack_others)
