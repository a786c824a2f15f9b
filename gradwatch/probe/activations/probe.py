"""Watch activation modules by forward hooks, on the steps that ask for it, and reduce what they give to a small row."""

# A = activation modules, C = units (channels or features) of one of them, S = statistics (the first four of
# catalogue.ACT)

from __future__ import annotations

import dataclasses
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Self, final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from gradwatch.probe.activations.accumulator import Call, Slot, Sums, statistics
from gradwatch.probe.activations.bitmask import Units
from gradwatch.probe.activations.functional import Functions, Seen
from gradwatch.probe.activations.rules import Rules, rules_of
from gradwatch.probe.batches.target_match import Pairings
from gradwatch.probe.device import backend as kernels
from gradwatch.probe.gradients.recurrence import Recurrences
from gradwatch.probe.graph.graph import Node, uncollected
from gradwatch.probe.inert_hook import inert_hook
from gradwatch.probe.parameters import Models, named_modules
from gradwatch.records import ActivationInfo

# What a compiled graph may note down inside of activation checkpointing, without doing so again in the recomputation.
_ONCE_UNDER_CHECKPOINT = "skip_fwd_side_effects_in_bwd_under_checkpoint"

_CHANNELS_FIRST = (nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase, nn.GroupNorm)
_FEATURES_LAST = (nn.Linear, nn.LayerNorm, nn.Embedding, nn.MultiheadAttention, nn.RNNBase)
_HAVE_A_FAST_PATH = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)
"""Modules that compute otherwise in evaluation where a hook is on them or in them."""


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
    that are modules (`nn.ReLU()`); those that are functions (`F.relu`) are read off the tape that the outermost modules
    leave behind, once somebody has said that they are wanted (`find_functions`): `fc1.relu` is the one behind `fc1`.
    Which there are shows at the first step. Units are channels or features: dimension 1 after a
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
        infos: The watched activations in the order of the model.
        spent_s: Seconds that hooks took since `arm`.
        depth: Calls under way of modules that may be outermost ones.
        recurrences: Reads gradients on their way back through a recurrence, where the outermost modules are looked at;
            or None.
        pairings: Compares predictions with the targets of other samples, likewise.
    """

    def __init__(self, model: Models, *, max_elements: int = 65536, kernel: kernels.Kernel = "auto") -> None:
        self.is_armed = False
        self.spent_s = 0.0
        self.depth = 0
        self._slots: list[Slot] = []
        self._is_traced = False
        self._places: list[Callable[[], RemovableHandle]] = []
        self._handles: list[RemovableHandle] = []
        self._tracing: tuple[Any, Any] | None = None  # configuration of torch.compile, and what it was
        self._model, self._limit, self._sums = model, max_elements, Sums(kernels.choose(kernel))
        self._functions: Functions | None = None
        self.recurrences: Recurrences | None = None
        self.pairings: Pairings | None = None
        self._tell: Callable[[tuple[ActivationInfo, ...]], bool] | None = None
        self._known: set[Node] = set()  # of modules, in the forward pass under way
        self._outermost: dict[nn.Module, None] = {}  # that may be
        self._called: dict[nn.Module, None] = {}  # that were
        self._found: dict[tuple[str, str], Slot] = {}  # by name and type
        self._order: dict[ActivationInfo, float] = {}
        infos: list[ActivationInfo] = []
        channels_first: bool | None = None
        for place, (name, module) in enumerate(named_modules(model)):
            if isinstance(module, (*_CHANNELS_FIRST, *_FEATURES_LAST)):
                channels_first = isinstance(module, _CHANNELS_FIRST)
            rules = rules_of(module)
            if rules is not None:
                infos.append(ActivationInfo(name=name, module_type=type(module).__name__))
                self._order[infos[-1]] = place
                slot = Slot(rules, channels_first=channels_first, limit=max_elements, sums=self._sums)
                self._slots.append(slot)
                self._places.append(
                    partial(module.register_forward_hook, inert_hook(partial(self._after_forward, slot)))
                )
        for root in model.values() if isinstance(model, Mapping) else [model]:
            root = getattr(root, "_orig_mod", root)  # inside of torch.compile, to be traced with the rest
            self._places.append(
                partial(root.register_forward_pre_hook, inert_hook(partial(self._before_forward, self._slots)))
            )
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
        for reader in self._readers:
            reader.clear()

    def find_functions(self, tell: Callable[[tuple[ActivationInfo, ...]], bool]) -> None:
        """Watch activations that are functions too.

        Args:
            tell: Called with all `infos`, once, after the first step, where it called functions. It says whether there
                is room for them; else they are not watched.
        """
        self._functions, self._tell = Functions(self._model), tell
        self._look_inside()

    def expect(self, infos: tuple[ActivationInfo, ...]) -> None:
        """Take the layout of a history that has begun: what is in it is watched, and nothing else."""
        if set(self.infos) <= set(infos):
            of = dict(zip(self.infos, self._slots, strict=True))
            new = {info: self._new_slot() for info in infos if info not in of}
            self._found = {(info.name, info.module_type): slot for info, slot in new.items()}
            self.infos, self._slots = infos, [of.get(info) or new[info] for info in infos]
            self._functions = Functions(self._model) if self._found else None
            self._look_inside()

    def _look_inside(self) -> None:
        """Look from now on at what the outermost modules leave behind."""
        self.recurrences = Recurrences(self._model)
        self.pairings = Pairings()
        self._outermost = dict.fromkeys(_may_be_outermost(self._model))
        self._unhook()
        self._hook_up()

    @property
    def _looks_inside(self) -> bool:
        """Whether there is anything to look for in what the outermost modules leave behind."""
        return self._functions is not None or any(not reader.is_over for reader in self._readers)

    def state(self) -> dict[str, Any]:
        """Return what further looks depend on, plain data: which activations are watched, and what was read so far."""
        return {
            "activations": [dataclasses.asdict(info) for info in self.infos],
            "readers": [reader.state() for reader in self._readers],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave; which activations are watched is for `expect` to say, before."""
        for reader, saved in zip(
            self._readers, state.get("readers", ()), strict=False
        ):  # an older gradwatch saved none
            reader.restore(saved)

    def arm(self) -> None:
        """Start to sum up, from the next forward call on; what was summed before is dropped."""
        self._disarm()
        self._hook_up()
        self.is_armed = True
        self.spent_s = 0.0
        self.depth = 0
        self._sums.clear()
        for slot in self._slots:
            slot.clear()
        if self._functions:
            self._functions.begin()
        for reader in self._readers:
            reader.begin()
        dynamo = sys.modules.get("torch._dynamo")  # importing it takes a second, and is the business of torch.compile
        if dynamo is not None and hasattr(dynamo.config, _ONCE_UNDER_CHECKPOINT):
            self._tracing = (dynamo.config, getattr(dynamo.config, _ONCE_UNDER_CHECKPOINT))
            setattr(dynamo.config, _ONCE_UNDER_CHECKPOINT, True)  # its own `patch` takes ten times as long

    @property
    def _readers(self) -> tuple[Recurrences | Pairings, ...]:
        return tuple(filter(None, (self.recurrences, self.pairings)))

    def _hook_up(self) -> None:
        if not self._handles:
            self._handles = [register() for register in self._places]
            for module in self._outermost if self._looks_inside else ():
                self._handles.append(module.register_forward_pre_hook(inert_hook(self._on_enter)))
                self._handles.append(module.register_forward_hook(inert_hook(self._on_leave)))

    def _unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _disarm(self) -> None:
        self.is_armed = False
        self._known.clear()
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
        if self.is_armed:
            self._settle()
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

    def _before_forward(self, slots: Sequence[Slot], module: nn.Module, inputs: Any) -> None:
        if self.is_armed:
            self.attempt(_begin, slots, module)

    def _after_forward(self, slot: Slot, module: nn.Module, inputs: Any, output: Any) -> None:
        if self.is_armed and isinstance(output, torch.Tensor) and output.numel():
            self.attempt(_add, slot, module, output)
            self.know(output)

    def _on_enter(self, module: nn.Module, inputs: Any) -> None:
        """Count a call of a module that may be outermost."""
        if not torch.compiler.is_compiling() and self.is_armed:
            self.depth += 1

    def _on_leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and self.is_armed:
            self.depth -= 1
            if self.depth == 0:
                self.attempt(self.look, module, output)

    def know(self, output: torch.Tensor) -> None:
        """Note that an output was seen as that of a module."""
        if self._functions and not torch.compiler.is_compiling() and output.grad_fn is not None:
            self._known.add(output.grad_fn)

    def look(self, module: nn.Module, output: Any) -> None:
        """Read what functions gave in the forward call of a module that no other one called."""
        if not self._looks_inside or not _counts(module):
            return
        self._called[module] = None
        for slot in self._found.values():
            slot.call = 0
        if self._functions:
            with uncollected(), torch.no_grad():
                self._read_functions(self._functions, output)
        self._known.clear()
        for reader in self._readers:
            reader.look(output)

    def _read_functions(self, functions: Functions, output: Any) -> None:
        begun: list[Call] = []
        for seen in functions.look(output, known=self._known):
            slot = self._slot_of(seen)
            if slot is None:
                continue
            if not seen.is_kept or seen.output.dtype != torch.float32:  # to wait, a copy would be held
                slot.add(seen.output)
            elif (call := slot.begin(seen.output)) is not None:
                begun.append(call)
        if begun:
            self._sums.add(begun)

    def _slot_of(self, seen: Seen) -> Slot | None:
        """Return where a function is summed up, None where there is no room for it."""
        key = seen.name, seen.function.kind
        slot = self._found.get(key)
        if slot is None and self._tell:
            slot = self._found[key] = self._new_slot()
            self._order[ActivationInfo(name=seen.name, module_type=seen.function.kind)] = seen.place + 0.5
        if slot is not None and not slot.is_called:
            slot.learn(seen.function.rules, channels_first=seen.channels_first)
        return slot

    def _new_slot(self) -> Slot:
        return Slot(Rules(), channels_first=None, limit=self._limit, sums=self._sums)

    def _settle(self) -> None:
        """Make out, after the first step, which modules are the outermost and which functions there are."""
        if self._called and len(self._called) < len(self._outermost):
            self._outermost = self._called
        if self._tell is None:
            return
        tell, self._tell = self._tell, None
        if not self._found:
            self._functions = None
            return
        found = {ActivationInfo(name=name, module_type=kind): slot for (name, kind), slot in self._found.items()}
        of = dict(zip(self.infos, self._slots, strict=True)) | found
        infos = tuple(sorted(of, key=lambda info: self._order[info]))
        if tell(infos):
            self.infos, self._slots = infos, [of[info] for info in infos]
        else:
            self._found, self._functions = {}, None

    def dead_units(self) -> list[torch.Tensor | None]:
        """Return, after `read`, which units of each module never fired; None of those that have none or did not run."""
        return [slot.dead_units() for slot in self._slots]

    def packed_units(self) -> list[Units | None]:
        """Return the same on the host, waiting for the device; the next step may write to it."""
        return [slot.packed_units() for slot in self._slots]

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


def _may_be_outermost(models: Models) -> Iterator[nn.Module]:
    """Yield the modules that a loop may call: all but those inside of compiled ones and of torch's transformers."""
    closed: set[nn.Module] = set()
    for _, module in named_modules(models):
        is_compiled = hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
        if is_compiled or module in closed or isinstance(module, _HAVE_A_FAST_PATH):
            closed.update(module.modules())
        else:
            yield module
