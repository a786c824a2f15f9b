"""Watch activation modules by forward hooks, on the steps that ask for it, and reduce what they give to a small row."""

# A = activation modules, C = units (channels or features) of one of them, S = statistics (catalogue.ACT)

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Self, final

import torch
from torch import nn

from gradwatch.probe.activation_rules import SIGMOID_EDGE, Range, Rules, rules_of
from gradwatch.probe.layout import Models, named_modules
from gradwatch.probe.reduce import wide_dtype
from gradwatch.records import ActivationInfo

# What a compiled graph may note down inside of activation checkpointing, without doing so again in the recomputation.
_ONCE_UNDER_CHECKPOINT = "skip_fwd_side_effects_in_bwd_under_checkpoint"

_CHANNELS_FIRST = (nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase, nn.GroupNorm)
_FEATURES_LAST = (nn.Linear, nn.LayerNorm, nn.Embedding, nn.MultiheadAttention, nn.RNNBase)


class _Slot:
    """One watched module and what was summed over the calls of the current step. It keeps no activation."""

    def __init__(self, rules: Rules, *, channels_first: bool | None, limit: int) -> None:
        self.rules = rules
        self.channels_first = channels_first
        self.limit = limit
        self.clear()

    def clear(self) -> None:
        """Forget the step before."""
        self.sums: torch.Tensor | None = None  # (4,), see `_sums`
        self.dead: list[torch.Tensor] = []  # (C,) of each call within a forward pass: never fired so far
        self.call = 0

    def add(self, output: torch.Tensor) -> None:
        """Take in the output of one call."""
        x = output.detach()
        if self.rules.softmax_dim is not None:
            x = _leading(x.movedim(self.rules.softmax_dim, -1), self.limit).float()
            saturated = (x.amax(-1) > 0.5 + SIGMOID_EDGE).mean(dtype=torch.float32)  # p (1 - p) of the winner
        else:
            x = self._units_last(x).float()
            saturated = self.rules.saturated(x) if self.rules.saturated else x.new_tensor(math.nan)
        sums = _sums(x, saturated)
        self.sums = sums if self.sums is None else self.sums + sums
        if self.rules.dead is not None:
            self._add_dead(_never_left(x, self.rules.dead))

    def _add_dead(self, dead_C: torch.Tensor) -> None:
        """Join the units of this call with those of the same call in earlier forward passes of the step."""
        if self.call == len(self.dead):
            self.dead.append(dead_C)
        else:
            self.dead[self.call] = self.dead[self.call] & dead_C
        self.call += 1

    def _units_last(self, x: torch.Tensor) -> torch.Tensor:
        """Return leading samples with the units in the last dimension."""
        channels_first = x.ndim > 3 if self.channels_first is None else self.channels_first
        return _leading(x.movedim(1, -1) if channels_first and x.ndim > 2 else x, self.limit)

    def statistics(self) -> torch.Tensor | None:
        """Return the four statistics, of shape (S,), or None where nothing was called."""
        if self.sums is None:
            return None
        _, mean, square, saturated = self.sums / self.sums[0]
        std = (square - mean.square()).clamp_min(0).sqrt()
        dead = torch.cat(self.dead).mean(dtype=mean.dtype) if self.dead else mean.new_tensor(math.nan)
        return torch.stack([dead, saturated, mean, std]).float()


def _leading(x: torch.Tensor, limit: int) -> torch.Tensor:
    """Return the leading samples of outputs with units last: at most `limit` values, of one sample where need be."""
    while x.ndim > 1 and x[0].numel() > limit:
        x = x[0]
    return x[: max(1, limit // max(1, x[0].numel()))] if x.numel() > limit else x


def _sums(x: torch.Tensor, saturated: torch.Tensor) -> torch.Tensor:
    """Return what adds up over calls: number of values, and times it their mean, mean square and saturated fraction."""
    mean = x.mean()
    # Deviations first: the difference of mean square and squared mean would drown in the rounding of float32.
    variance = torch.linalg.vector_norm(x - mean).square() / x.numel()
    mean, variance, saturated = (v.to(wide_dtype(x.device)) for v in (mean, variance, saturated))
    return torch.stack([torch.ones_like(mean), mean, variance + mean.square(), saturated]) * x.numel()


def _never_left(x: torch.Tensor, interval: Range) -> torch.Tensor:
    """Say of each unit, the last dimension, whether all its outputs lie in the interval. NaN lies in none."""
    low, high = interval
    samples = tuple(range(x.ndim - 1))
    inside_C = (x.amax(samples) if samples else x) <= high
    return inside_C if low == -math.inf else inside_C & ((x.amin(samples) if samples else x) >= low)


def _counts(module: nn.Module) -> bool:
    """Say whether this forward call is one of the step's: training, with gradients, and not done over in the backward.

    Activation checkpointing runs a forward twice. The non-reentrant kind runs it as usual and again while a backward is
    under way; the reentrant kind runs it without gradients first, so that the second run is the one to count.
    """
    if not module.training or not torch.is_grad_enabled():
        return False
    if torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:
        return True
    node = torch._C._current_autograd_node()
    return node is not None and node.name() == "CheckpointFunctionBackward"


@final
class ActivationProbe:
    """Statistics of every activation module of a model, over all forward calls of an optimizer step.

    Its hooks do nothing until it is armed. They see activations that are modules (`nn.ReLU()`), not functions
    (`F.relu`). Units are channels or features: dimension 1 after a convolution, batch or group norm, the last after a
    linear layer, embedding or layer norm, whichever module comes before in the model's order; where none does,
    dimension 1 of outputs with four or more dimensions. A module that is called several times in a forward pass has
    its units once per call.

    Under torch.compile the hooks are traced without a graph break, if the probe was made before the first compiled
    call. Armed and disarmed steps are then two compiled graphs.

    Args:
        model: A model, or several by name.
        max_elements: At most so many values are read per call: those of the leading samples.
    """

    def __init__(self, model: Models, *, max_elements: int = 262144) -> None:
        self._is_armed = False
        self._slots: list[_Slot] = []
        self._hooks = ExitStack()
        self._tracing = ExitStack()
        infos: list[ActivationInfo] = []
        channels_first: bool | None = None
        for name, module in named_modules(model):
            if isinstance(module, (*_CHANNELS_FIRST, *_FEATURES_LAST)):
                channels_first = isinstance(module, _CHANNELS_FIRST)
            rules = rules_of(module)
            if rules is not None:
                infos.append(ActivationInfo(name=name, module_type=type(module).__name__))
                slot = _Slot(rules, channels_first=channels_first, limit=max_elements)
                self._slots.append(slot)
                self._hooks.callback(module.register_forward_hook(self._hook(slot)).remove)
        for root in model.values() if isinstance(model, Mapping) else [model]:
            root = getattr(root, "_orig_mod", root)  # inside of torch.compile, to be traced with the rest
            self._hooks.callback(root.register_forward_pre_hook(self._begin_forward).remove)
        self.infos = tuple(infos)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Take all hooks off the model."""
        self._disarm()
        self._hooks.close()

    def arm(self) -> None:
        """Start to sum up, from the next forward call on; what was summed before is dropped."""
        self._disarm()
        self._is_armed = True
        for slot in self._slots:
            slot.clear()
        dynamo = sys.modules.get("torch._dynamo")  # importing it takes a second, and is the business of torch.compile
        if dynamo is not None and hasattr(dynamo.config, _ONCE_UNDER_CHECKPOINT):
            self._tracing.enter_context(dynamo.config.patch(_ONCE_UNDER_CHECKPOINT, True))

    def _disarm(self) -> None:
        self._is_armed = False
        self._tracing.close()

    def read(self) -> torch.Tensor | None:
        """Stop, and return what the calls since `arm` gave.

        Returns:
            Tensor of shape (S, A), float32, on the device of the activations, in the order of `catalogue.ACT` and
            `infos`; nan where a notion does not apply and where a module was not called. None where the probe was not
            armed or nothing was called.
        """
        columns = [slot.statistics() if self._is_armed else None for slot in self._slots]
        self._disarm()
        called = next((c for c in columns if c is not None), None)
        if called is None:
            return None
        missing = torch.full_like(called, math.nan)
        return torch.stack([missing if c is None else c.to(called.device) for c in columns], dim=1)

    def _hook(self, slot: _Slot) -> Callable[[nn.Module, Any, Any], None]:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            if self._is_armed and _counts(module) and isinstance(output, torch.Tensor) and output.numel():
                slot.add(output)

        return look

    def _begin_forward(self, module: nn.Module, inputs: Any) -> None:
        if self._is_armed and _counts(module):
            for slot in self._slots:
                slot.call = 0
