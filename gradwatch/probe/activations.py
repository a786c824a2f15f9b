"""Watch activation modules by forward hooks, on the steps that ask for it, and reduce what they give to a small row."""

# A = activation modules, C = units (channels or features) of one of them, S = statistics (catalogue.ACT)

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import ModuleType
from typing import Any, Self, final

import torch
from torch import nn

from gradwatch.probe import kernel as kernels
from gradwatch.probe.activation_rules import SIGMOID_EDGE, Range, Rules, rules_of
from gradwatch.probe.layout import Models, named_modules
from gradwatch.probe.reduce import NUM_STATISTICS, wide_dtype
from gradwatch.probe.transfer import to_host
from gradwatch.records import ActivationInfo

# What a compiled graph may note down inside of activation checkpointing, without doing so again in the recomputation.
_ONCE_UNDER_CHECKPOINT = "skip_fwd_side_effects_in_bwd_under_checkpoint"

_SMALL_MAP = 64  # values of a channel side by side, below which the CPU reduces over samples first; measured: 25 times

_CHANNELS_FIRST = (nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase, nn.GroupNorm)
_FEATURES_LAST = (nn.Linear, nn.LayerNorm, nn.Embedding, nn.MultiheadAttention, nn.RNNBase)


class _Slot:
    """One watched module and what was summed over the calls of the current step. It keeps no activation."""

    def __init__(self, rules: Rules, *, channels_first: bool | None, limit: int, native: ModuleType | None) -> None:
        self.rules = rules
        self.channels_first = channels_first
        self.limit = limit
        self.native = native
        self.clear()

    def clear(self) -> None:
        """Forget the step before."""
        self.moments: torch.Tensor | None = None  # (3,): number of values, and times it their mean and mean square
        self.saturated: torch.Tensor | None = None  # number of values times their saturated fraction
        self.dead: list[torch.Tensor] = []  # (C,) of each call within a forward pass: never fired so far
        self.call = 0

    def add(self, output: torch.Tensor) -> None:
        """Take in the output of one call."""
        rules, x = self.rules, self._sample(output.detach()).float()
        self.moments = _plus(self.moments, _moments(x, native=self.native))
        if rules.softmax_dim is not None:
            winner = x.amax(-1)  # whose slope is p (1 - p)
            self.saturated = _plus(self.saturated, (winner > 0.5 + SIGMOID_EDGE).mean(dtype=torch.float32) * x.numel())
        elif rules.saturated is not None:
            self.saturated = _plus(self.saturated, rules.saturated(x) * x.numel())
        if rules.dead is not None:
            self._add_dead(_never_left(x, rules.dead))

    def _sample(self, x: torch.Tensor) -> torch.Tensor:
        """Return leading samples with units, or the classes of a softmax, in the last dimension."""
        if self.rules.softmax_dim is not None:
            return _leading(x.movedim(self.rules.softmax_dim, -1), self.limit)
        channels_first = x.ndim > 3 if self.channels_first is None else self.channels_first
        return _leading(x.movedim(1, -1) if channels_first and x.ndim > 2 else x, self.limit)

    def _add_dead(self, dead_C: torch.Tensor) -> None:
        """Join the units of this call with those of the same call in earlier forward passes of the step."""
        if self.call == len(self.dead):
            self.dead.append(dead_C)
        else:
            self.dead[self.call] = self.dead[self.call] & dead_C
        self.call += 1

    def dead_frac(self) -> torch.Tensor:
        """Return the fraction of units that never fired, where there are units that can be dead."""
        return (self.dead[0] if len(self.dead) == 1 else torch.cat(self.dead)).mean(dtype=torch.float32)


def _plus(total: torch.Tensor | None, term: torch.Tensor) -> torch.Tensor:
    return term if total is None else total + term


def _leading(x: torch.Tensor, limit: int) -> torch.Tensor:
    """Return the leading samples of outputs with units last: at most `limit` values, of one sample where need be."""
    while x.ndim > 1 and math.prod(x.shape[1:]) > limit:
        x = x[0]
    return x[: max(1, limit // math.prod(x.shape[1:]))] if x.numel() > limit else x


def _moments(x: torch.Tensor, *, native: ModuleType | None) -> torch.Tensor:
    """Return what adds up over calls: the number of values, and times it their mean and mean square; shape (3,)."""
    n = x.numel()
    if native is not None and not torch.compiler.is_compiling():
        row_S1 = torch.empty((NUM_STATISTICS, 1), dtype=torch.float32, device="cpu")
        if native.statistics((x,), False, row_S1, 1.0) is None:
            mean, std = map(float, to_host(row_S1)[2:4, 0])
            return torch.tensor([n, n * mean, n * (std * std + mean * mean)], dtype=torch.float64, device="cpu")
    average = x.mean()
    # Deviations first: the difference of mean square and squared mean would drown in the rounding of float32.
    variance = torch.linalg.vector_norm(x - average).square() / n
    average, variance = average.to(wide_dtype(x.device)), variance.to(wide_dtype(x.device))
    return torch.stack([torch.ones_like(average), average, variance + average.square()]) * n


def _never_left(x: torch.Tensor, interval: Range) -> torch.Tensor:
    """Say of each unit, the last dimension, whether all its outputs lie in the interval. NaN lies in none."""
    low, high = interval
    inside_C = _extreme(x, torch.amax) <= high
    return inside_C if low == -math.inf else inside_C & (_extreme(x, torch.amin) >= low)


def _extreme(x: torch.Tensor, reduce: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Return the largest or smallest output of each unit, the last dimension of x."""
    if x.ndim == 4 and x.stride(-1) > 1 and x.stride(-1) < _SMALL_MAP:
        x = reduce(x.movedim(-1, 1), 0).movedim(0, -1)
    return reduce(x, tuple(range(x.ndim - 1))) if x.ndim > 1 else x


def _statistics(slots: list[_Slot]) -> torch.Tensor:
    """Return the statistics of modules that were called, of shape (S, A), float32, on the device of the first."""
    moments = [slot.moments for slot in slots if slot.moments is not None]
    device = moments[0].device
    n_A, mean_A, square_A = torch.stack([m.to(device) for m in moments], dim=1)
    mean_A, square_A = mean_A / n_A, square_A / n_A
    std_A = (square_A - mean_A.square()).clamp_min_(0).sqrt_()
    nan = torch.full((), math.nan, dtype=torch.float32, device=device)
    saturated_A = torch.stack([nan if slot.saturated is None else slot.saturated.to(device) for slot in slots]) / n_A
    dead_A = torch.stack([slot.dead_frac().to(device) if slot.dead else nan for slot in slots])
    return torch.stack([dead_A, saturated_A, mean_A, std_A]).float()


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
class _AfterForward:
    """The hook on an activation module. A copy of it, made or saved with the model, does nothing."""

    def __init__(self, probe: ActivationProbe | None = None, slot: _Slot | None = None) -> None:
        self._probe = probe
        self._slot = slot

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._probe is not None and self._probe.is_armed and isinstance(output, torch.Tensor) and output.numel():
            self._probe.attempt(_add, self._slot, module, output)

    def __reduce__(self) -> tuple[Any, ...]:
        return _AfterForward, ()


@final
class _BeforeForward:
    """The hook on a whole model. A copy of it, made or saved with the model, does nothing."""

    def __init__(self, probe: ActivationProbe | None = None, slots: Sequence[_Slot] = ()) -> None:
        self._probe = probe
        self._slots = slots

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        if self._probe is not None and self._probe.is_armed:
            self._probe.attempt(_begin, self._slots, module)

    def __reduce__(self) -> tuple[Any, ...]:
        return _BeforeForward, ()


def _add(slot: _Slot, module: nn.Module, output: torch.Tensor) -> None:
    if _counts(module):
        slot.add(output)


def _begin(slots: Sequence[_Slot], module: nn.Module) -> None:
    """Count calls anew, before a forward call of a model."""
    if _counts(module):
        for slot in slots:
            slot.call = 0


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

    A copy of the model is not watched. What goes wrong in a hook never reaches the forward call: it is named in one
    RuntimeWarning, and the hooks come off.

    Args:
        model: A model, or several by name.
        max_elements: At most so many values are read per call: those of the leading samples.
        kernel: Which code reads tensors on the CPU; for tests and measurements.

    Attributes:
        is_armed: Whether the hooks sum up.
        infos: The watched modules in the order of the model.
    """

    def __init__(self, model: Models, *, max_elements: int = 65536, kernel: kernels.Kernel = "auto") -> None:
        self.is_armed = False
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
                slot = _Slot(rules, channels_first=channels_first, limit=max_elements, native=kernels.choose(kernel))
                self._slots.append(slot)
                self._hooks.callback(module.register_forward_hook(_AfterForward(self, slot)).remove)
        for root in model.values() if isinstance(model, Mapping) else [model]:
            root = getattr(root, "_orig_mod", root)  # inside of torch.compile, to be traced with the rest
            self._hooks.callback(root.register_forward_pre_hook(_BeforeForward(self, self._slots)).remove)
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
        self.is_armed = True
        for slot in self._slots:
            slot.clear()
        dynamo = sys.modules.get("torch._dynamo")  # importing it takes a second, and is the business of torch.compile
        if dynamo is not None and hasattr(dynamo.config, _ONCE_UNDER_CHECKPOINT):
            self._tracing.enter_context(dynamo.config.patch(_ONCE_UNDER_CHECKPOINT, True))

    def _disarm(self) -> None:
        self.is_armed = False
        self._tracing.close()

    def read(self) -> torch.Tensor | None:
        """Stop, and return what the calls since `arm` gave.

        Returns:
            Tensor of shape (S, A), float32, on the device of the activations, in the order of `catalogue.ACT` and
            `infos`; nan where a notion does not apply and where a module was not called. None where the probe was not
            armed or nothing was called.
        """
        called = [i for i, slot in enumerate(self._slots) if slot.moments is not None] if self.is_armed else []
        self._disarm()
        if not called:
            return None
        row_SA = _statistics([self._slots[i] for i in called])
        if len(called) == len(self._slots):
            return row_SA
        whole_SA = row_SA.new_full((row_SA.shape[0], len(self._slots)), math.nan)
        whole_SA[:, called] = row_SA
        return whole_SA

    def attempt(self, look: Callable[..., None], *args: Any) -> None:
        """Look at a forward call; where that raises, say so and leave the model alone from then on."""
        if torch.compiler.is_compiling():
            look(*args)  # what cannot be traced is for torch.compile to tell
            return
        try:
            look(*args)
        except Exception as error:  # whatever it is, the forward call is worth more
            self.close()
            text = f"the probe of activations is switched off: {type(error).__name__}: {error}"
            warnings.warn(f"gradwatch: {text}", RuntimeWarning, stacklevel=3)
