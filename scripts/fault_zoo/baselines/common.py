"""Share a list of findings and the hooks that read a training run among the baselines."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from scripts.fault_zoo.protocol import Finding


class Log:
    """Keep one finding per kind and layer, at the step of the first report."""

    def __init__(self) -> None:
        self.items: dict[tuple[str, str | None], Finding] = {}

    def add(self, kind: str, layer: str | None, step: int, severity: str = "warning") -> None:
        """Add a finding unless the kind was reported for the layer."""
        self.items.setdefault((kind, layer), Finding(kind, layer, step, severity))

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.items.values())


class Baseline(ABC):
    """Pass the losses of a run to the rules of a tool, which go into `check`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: Any = None,
        accumulate: int = 1,
        loss_fn: Any = None,
    ) -> None:
        self.model, self.optimizer, self.scaler = model, optimizer, scaler
        self.log, self.now = Log(), 0
        self.grads: dict[str, Tensor] = {}
        self.parameters = dict(model.named_parameters())  # shared parameters once, under their first name
        self.modules = {m: n for n, m in model.named_modules()}

    def step(self, loss: Any, **context: Any) -> None:
        """Check the step that ends now."""
        val_loss = context.get("val_loss")
        self.check(number(loss), None if val_loss is None else number(val_loss))
        self.now += 1

    @abstractmethod
    def check(self, loss: float, val_loss: float | None) -> None:
        """Apply the rules to step `now`."""

    def findings(self) -> list[Finding]:
        """Return the findings in the order of their reports."""
        return list(self.log)


def number(x: Tensor | float) -> float:
    """Return a loss as a number."""
    return float(x.detach()) if isinstance(x, torch.Tensor) else float(x)


def dense(g: Tensor) -> Tensor:
    """Return a gradient as a dense tensor."""
    return g.coalesce().to_dense() if g.is_sparse else g


def watch_gradients(base: Baseline) -> None:
    """Keep in `base.grads` the gradient of each parameter in the last backward pass, as a hook on it reads it.

    That is before clipping, and multiplied by the loss scale.
    """
    for name, p in base.parameters.items():
        if p.requires_grad:
            p.register_hook(partial(_keep_gradient, base, name))


def _keep_gradient(base: Baseline, name: str, grad: Tensor) -> None:
    base.grads[name] = dense(grad.detach())


def watch_steps(base: Baseline) -> None:
    """Keep in `base.grads` the gradients as the optimizer receives them: unscaled, clipped, accumulated."""

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        base.grads = {n: dense(p.grad.detach()).clone() for n, p in base.parameters.items() if p.grad is not None}

    base.optimizer.register_step_pre_hook(before)


def watch_modules(
    base: Baseline,
    kinds: type[nn.Module] | tuple[type[nn.Module], ...],
    keep: Callable[[str, nn.Module, Any, Any], None],
) -> None:
    """Call `keep(name, module, inputs, output)` after each forward pass of a module of these kinds, in training.

    Tensors inside a torch.func transform are not passed: they must not outlive it.
    """

    def hook(m: nn.Module, i: Any, o: Any) -> None:
        if torch.is_grad_enabled() and m.training and not torch._C._functorch.is_functorch_wrapped_tensor(o):
            keep(base.modules[m], m, i, o)

    for module in base.modules:
        if isinstance(module, kinds):
            module.register_forward_hook(hook)


def units(activation: Tensor) -> Tensor:
    """Return an activation as (samples, units). Units are the last dimension, or the channels of an image."""
    a = activation.detach().float()
    if a.ndim == 4:
        a = a.transpose(1, -1)
    return a.reshape(-1, a.shape[-1]) if a.ndim > 1 else a.reshape(-1, 1)


def finite(*values: float | None) -> bool:
    """Return whether all values are there and finite."""
    return all(v is not None and math.isfinite(v) for v in values)
