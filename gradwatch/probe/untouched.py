"""Restore gradients, buffers and generators after experiments with a loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def untouched(model: nn.Module, params: Sequence[Tensor]) -> Iterator[None]:
    """Restore gradients, buffers and generators afterwards: a loss may call `backward` or train a normalization."""
    kept: list[tuple[Tensor, Any]] = [(p, p.grad) for p in params]
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    devices = list({p.device for p in params if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices):
        for p in params:
            p.grad = None  # else a `backward` in the loss would add to the gradient in place
        try:
            yield
        finally:
            for p, grad in kept:
                p.grad = grad
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
