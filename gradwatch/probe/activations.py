"""Watch activation modules by forward hooks, on the steps that ask for it, and reduce what they give to a small row."""

# A = activation modules, C = units (channels or features) of one of them, S = statistics (the first four of
# catalogue.ACT)

from __future__ import annotations

import math
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Self, final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from gradwatch.probe import kernel as kernels
from gradwatch.probe.activation_rules import rules_of
from gradwatch.probe.activation_slot import Slot, statistics
from gradwatch.probe.layout import Models, named_modules
from gradwatch.records import ActivationInfo

# What a compiled graph may note down inside of activation checkpointing, without doing so again in the recomputation.
_ONCE_UNDER_CHECKPOINT = "skip_fwd_side_effects_in_bwd_under_checkpoint"

_CHANNELS_FIRST = (nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase, nn.GroupNorm)
_FEATURES_LAST = (nn.Linear, nn.LayerNorm, nn.Embedding, nn.MultiheadAttention, nn.RNNBase)


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

    def __init__(self, probe: ActivationProbe | None = None, slot: Slot | None = None) -> None:
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

    def __init__(self, probe: ActivationProbe | None = None, slots: Sequence[Slot] = ()) -> None:
        self._probe = probe
        self._slots = slots

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        if self._probe is not None and self._probe.is_armed:
            self._probe.attempt(_begin, self._slots, module)

    def __reduce__(self) -> tuple[Any, ...]:
        return _BeforeForward, ()


def _add(slot: Slot, module: nn.Module, output: torch.Tensor) -> None:
    if _counts(module):
        slot.add(output)


def _begin(slots: Sequence[Slot], module: nn.Module) -> None:
    """Count calls anew, before a forward call of a model."""
    if _counts(module):
        for slot in slots:
            slot.call = 0


@final
class ActivationProbe:
    """Statistics of every activation module of a model, over all forward calls of an optimizer step.

    Its hooks do nothing until it is armed, and after the first step are there only while it is. They see activations
    that are modules (`nn.ReLU()`), not functions (`F.relu`). Units are channels or features: dimension 1 after a
    convolution, batch or group norm, the last after a linear layer, embedding or layer norm, whichever module comes
    before in the model's order; where none does, dimension 1 of outputs with four or more dimensions. A module that is
    called several times in a forward pass has its units once per call.

    Under torch.compile the hooks are traced without a graph break, if the probe was made before the first compiled
    call. Armed and disarmed steps are then two compiled graphs, and the hooks stay.

    A copy of the model is not watched. What goes wrong in a hook never reaches the forward call: it is named in one
    RuntimeWarning, and the hooks come off.

    Args:
        model: A model, or several by name.
        max_elements: At most so many values are read per call: those of the leading samples.
        kernel: Which code reads tensors on the CPU; for tests and measurements.

    Attributes:
        is_armed: Whether the hooks sum up.
        infos: The watched modules in the order of the model.
        spent_s: Seconds that hooks took since `arm`.
    """

    def __init__(self, model: Models, *, max_elements: int = 65536, kernel: kernels.Kernel = "auto") -> None:
        self.is_armed = False
        self.spent_s = 0.0
        self._slots: list[Slot] = []
        self._is_traced = False
        self._places: list[Callable[[], RemovableHandle]] = []
        self._handles: list[RemovableHandle] = []
        self._tracing: tuple[Any, Any] | None = None  # configuration of torch.compile, and what it was
        infos: list[ActivationInfo] = []
        channels_first: bool | None = None
        for name, module in named_modules(model):
            if isinstance(module, (*_CHANNELS_FIRST, *_FEATURES_LAST)):
                channels_first = isinstance(module, _CHANNELS_FIRST)
            rules = rules_of(module)
            if rules is not None:
                infos.append(ActivationInfo(name=name, module_type=type(module).__name__))
                slot = Slot(rules, channels_first=channels_first, limit=max_elements, native=kernels.choose(kernel))
                self._slots.append(slot)
                self._places.append(partial(module.register_forward_hook, _AfterForward(self, slot)))
        for root in model.values() if isinstance(model, Mapping) else [model]:
            root = getattr(root, "_orig_mod", root)  # inside of torch.compile, to be traced with the rest
            self._places.append(partial(root.register_forward_pre_hook, _BeforeForward(self, self._slots)))
        self.infos = tuple(infos)
        self._hook_up()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Take all hooks off the model."""
        self._disarm()
        self._places.clear()
        self._unhook()

    def arm(self) -> None:
        """Start to sum up, from the next forward call on; what was summed before is dropped."""
        self._disarm()
        self._hook_up()
        self.is_armed = True
        self.spent_s = 0.0
        for slot in self._slots:
            slot.clear()
        dynamo = sys.modules.get("torch._dynamo")  # importing it takes a second, and is the business of torch.compile
        if dynamo is not None and hasattr(dynamo.config, _ONCE_UNDER_CHECKPOINT):
            self._tracing = (dynamo.config, getattr(dynamo.config, _ONCE_UNDER_CHECKPOINT))
            setattr(dynamo.config, _ONCE_UNDER_CHECKPOINT, True)  # its own `patch` takes ten times as long

    def _hook_up(self) -> None:
        if not self._handles:
            self._handles = [register() for register in self._places]

    def _unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _disarm(self) -> None:
        self.is_armed = False
        if self._tracing:
            config, before = self._tracing
            setattr(config, _ONCE_UNDER_CHECKPOINT, before)
            self._tracing = None

    def read(self) -> torch.Tensor | None:
        """Stop, and return what the calls since `arm` gave.

        Returns:
            Tensor of shape (S, A), float32, on the device of the activations, in the order of `catalogue.ACT` and
            `infos`; nan where a notion does not apply and where a module was not called. None where the probe was not
            armed or nothing was called.
        """
        called = [i for i, slot in enumerate(self._slots) if slot.is_called] if self.is_armed else []
        self._disarm()
        if not called:
            return None
        if not self._is_traced:
            self._unhook()  # a module with hooks takes 5 us longer to call
        row_SA = statistics([self._slots[i] for i in called])
        if len(called) == len(self._slots):
            return row_SA
        whole_SA = row_SA.new_full((row_SA.shape[0], len(self._slots)), math.nan)
        whole_SA[:, called] = row_SA
        return whole_SA

    def dead_units(self) -> list[torch.Tensor | None]:
        """Return, after `read`, which units of each module never fired; None of those that have none or did not run."""
        return [slot.dead_units() for slot in self._slots]

    def attempt(self, look: Callable[..., None], *args: Any) -> None:
        """Look at a forward call; where that raises, say so and leave the model alone from then on."""
        if torch.compiler.is_compiling():
            self._is_traced = True
            look(*args)  # what cannot be traced is for torch.compile to tell
            return
        began = time.perf_counter()
        try:
            look(*args)
            self.spent_s += time.perf_counter() - began
        except Exception as error:  # whatever it is, the forward call is worth more
            self.close()
            text = f"the probe of activations is switched off: {type(error).__name__}: {error}"
            warnings.warn(f"gradwatch: {text}", RuntimeWarning, stacklevel=3)
