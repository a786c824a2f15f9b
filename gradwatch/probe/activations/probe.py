"""Watch activations by forward hooks, on sampled steps, and reduce their outputs to a small row of statistics."""

# A = activation modules, C = units (channels or features) of one module, S = statistics (the first six of
# catalogue.ACT)

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Self, final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from gradwatch.attempts import Attempts
from gradwatch.probe.activations.accumulator import ActivationAccumulator, PendingCall, SharedSums, statistics
from gradwatch.probe.activations.bitmask import UnitMask
from gradwatch.probe.activations.functional import FunctionalActivations, FunctionCall
from gradwatch.probe.activations.latent import LatentReader
from gradwatch.probe.activations.padding import PaddingReader
from gradwatch.probe.activations.rules import ActivationRules, rules_of
from gradwatch.probe.activations.token_targets import TokenTargets
from gradwatch.probe.batches.target_match import TargetMatch
from gradwatch.probe.device import backend as kernels
from gradwatch.probe.device.dtensor import local_part
from gradwatch.probe.device.sync import on_device
from gradwatch.probe.gradients.recurrence import RecurrenceProbe
from gradwatch.probe.graph.graph import Node, uncollected
from gradwatch.probe.inert_hook import inert_hook, remove_hooks, takes_hooks
from gradwatch.probe.nested import has_plain_values, tensors_of
from gradwatch.probe.output_reader import OutputReader, OutputReaders
from gradwatch.probe.parameters import Models, hookable_modules, named_modules
from gradwatch.records import ActivationInfo

# lets a compiled graph run side effects once inside activation checkpointing, not again in the recomputation
_ONCE_UNDER_CHECKPOINT = "skip_fwd_side_effects_in_bwd_under_checkpoint"

ACTIVATIONS = "the activation probe"
"""Name of the probe among the parts of the monitor."""

_CHANNELS_FIRST = (nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase, nn.GroupNorm)
_FEATURES_LAST = (nn.Linear, nn.LayerNorm, nn.Embedding, nn.MultiheadAttention, nn.RNNBase)


def _is_in_step(module: nn.Module) -> bool:
    """Return whether a forward call belongs to the step: training, with gradients, and not a recomputation.

    Activation checkpointing runs a forward twice. The non-reentrant kind runs it as usual and again during the
    backward; the reentrant kind runs it without gradients first, so the second run counts.
    """
    if not module.training or not torch.is_grad_enabled():
        return False
    if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None:
        return False  # inside `torch.func`, tensors are wrappers without readable values
    if torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:  # -1: no backward is running
        return True
    # the name of the reentrant kind
    node = torch._C._current_autograd_node()
    return node is not None and node.name() == "CheckpointFunctionBackward"


def _before_forward(
    probe: ActivationProbe, accumulators: Sequence[ActivationAccumulator], module: nn.Module, inputs: Any
) -> None:
    if probe.is_armed:
        probe.attempt(_begin, accumulators, module)


def _after_forward(
    probe: ActivationProbe, accumulator: ActivationAccumulator, module: nn.Module, inputs: Any, output: Any
) -> None:
    if not probe.is_armed or not isinstance(output, torch.Tensor):
        return
    part = output if torch.compiler.is_compiling() else local_part(output)
    # an empty output has no mean
    if part.numel() and has_plain_values(part):
        probe.attempt(_add, accumulator, module, part)
        if probe.functions:
            probe.functions.exclude(output)


def _on_enter(probe: ActivationProbe, module: nn.Module, inputs: Any) -> None:
    # every hooked module counts, so that depth 0 is reached only after the outermost one
    if probe.is_armed:
        probe.depth += 1


def _on_leave(probe: ActivationProbe, original: nn.Module, module: nn.Module, inputs: Any, output: Any) -> None:
    # meta-learning calls shallow copies, which share the hooks of the original and must not be kept
    if probe.is_armed:
        probe.depth -= 1
        if probe.depth == 0 and _is_in_step(module):
            probe.attempt(probe.inspect, original, output, inputs)


def _add(accumulator: ActivationAccumulator, module: nn.Module, output: torch.Tensor) -> None:
    if _is_in_step(module):
        accumulator.add(output)


def _begin(accumulators: Iterable[ActivationAccumulator], module: nn.Module) -> None:
    # a step may have several forward passes: the n-th call of each is the same place in the model
    if _is_in_step(module):
        for accumulator in accumulators:
            accumulator.call = 0


@final
class FunctionAccumulators:
    """Accumulators of functional activations, such as `fc1.relu`, found in the graphs of the outermost modules.

    Args:
        models: A model, or several by name.
        sums: Sums of the C extension.
        new: Makes an accumulator without rules, which the first call sets.
        found: Accumulators of the activations of an earlier run.
        is_open: Whether further activations are added.
    """

    def __init__(
        self,
        models: Models,
        sums: SharedSums,
        new: Callable[[], ActivationAccumulator],
        *,
        found: Mapping[ActivationInfo, ActivationAccumulator] | None = None,
        is_open: bool,
    ) -> None:
        self.found = dict(found or {})
        self.order: dict[ActivationInfo, float] = {}
        self.is_open = is_open
        self._activations, self._sums, self._new = FunctionalActivations(models), sums, new
        self._modules: set[Node] = set()  # nodes of activation modules in the current forward pass

    def begin(self) -> None:
        """Prepare for the next step."""
        self._activations.begin()
        self.end_forward()

    def end_forward(self) -> None:
        """Drop the nodes of the current forward pass, which would keep its graph alive."""
        self._modules.clear()

    def exclude(self, output: torch.Tensor) -> None:
        """Exclude the output of an activation module, which has its own hook."""
        if not torch.compiler.is_compiling() and output.grad_fn is not None:
            self._modules.add(output.grad_fn)

    def read(self, output: Any) -> None:
        """Accumulate the functional activations in the graph of the output of a forward call."""
        for accumulator in self.found.values():
            accumulator.call = 0
        pending: list[PendingCall] = []
        with uncollected(), torch.no_grad():
            for call in self._activations.find(output, known=self._modules):
                if (own := self._accumulator_of(call)) is None:
                    continue
                if call.attention is not None:
                    own.add_attention(call.attention)
                if call.output is None:
                    continue
                if not call.is_kept or call.output.dtype != torch.float32:  # a pending call would keep the copy alive
                    own.add(call.output)
                elif (begun := own.begin(call.output)) is not None:
                    pending.append(begun)  # one call of the extension for all of them
            if pending:
                self._sums.add(pending)

    def _accumulator_of(self, call: FunctionCall) -> ActivationAccumulator | None:
        """Return the accumulator of a functional activation, or None if it is not watched."""
        info = ActivationInfo(name=call.name, module_type=call.function.kind)
        accumulator = self.found.get(info)
        if accumulator is None and self.is_open:
            accumulator = self.found[info] = self._new()
            self.order[info] = call.module_index + 0.5  # after that module
        # only at the first call of a step: sums of one step must follow the same rules
        if accumulator is not None and not accumulator.is_called:
            accumulator.update_rules(call.function.rules, channels_first=call.channels_first)
        return accumulator


@final
class HookSet:
    """Hooks that are attached and removed together.

    Attributes:
        register: Functions that attach one hook each.
    """

    def __init__(self) -> None:
        self.register: list[Callable[[], RemovableHandle]] = []
        self._handles: list[RemovableHandle] = []

    def attach(self) -> None:
        """Attach all hooks, unless they are attached already. If a module refuses its hook, remove them all."""
        if self._handles:
            return
        try:
            for register in self.register:
                self._handles.append(register())
        except Exception:  # of any kind, and raised again: no hook may stay
            self.remove()
            raise

    def remove(self) -> None:
        """Remove all hooks."""
        remove_hooks(self._handles)


READERS: tuple[Callable[[Models], OutputReader], ...] = (
    RecurrenceProbe,
    TargetMatch,
    TokenTargets,
    PaddingReader,
    LatentReader,
)
"""Readers of the outputs of whole models."""


@final
class ActivationProbe:
    """Measure statistics of every activation of a model, over all forward calls of an optimizer step.

    The hooks do nothing until `arm`. After the first step, they are attached only while the probe is armed. Hooks see
    activations that are modules (`nn.ReLU()`). After `find_functions`, the probe also reads functional activations
    (`F.relu`) from the autograd graph of the outermost modules. `fc1.relu` is the functional activation after `fc1`.
    The first step shows which functional activations exist.

    Units are channels or features: dimension 1 after a convolution, batch or group norm; the last dimension after a
    linear layer, embedding or layer norm. The preceding module in the model's order decides. Without such a module,
    units are dimension 1 of outputs with four or more dimensions. If a forward pass calls a module n times, it has n
    times its units.

    torch.compile traces the hooks without a graph break, if the probe was made before the first compiled call. Armed
    and disarmed steps are then two compiled graphs, and the hooks stay.

    A copy of the model is not watched. An error in a hook never reaches the forward call; the step then has no
    statistics.

    Args:
        model: A model, or several by name.
        max_elements: Maximum number of values to read per call, from the leading samples.
        kernel: Backend that reads tensors on the CPU.

    Attributes:
        attempts: Counts the sampled steps at which a hook raised.
        is_armed: Whether the hooks accumulate.
        infos: The watched activations in the order of the model.
        spent_s: Seconds that hooks took since `arm`.
        depth: Calls in progress of modules that may be outermost.
        functions: Accumulators of functional activations, or None.
        readers: Readers of the outputs of the outermost modules, if these modules are inspected.
    """

    def __init__(self, model: Models, *, max_elements: int = 65536, kernel: kernels.Kernel = "auto") -> None:
        self.attempts = Attempts()
        self._failure: Exception | None = None
        self.is_armed, self.spent_s, self.depth = False, 0.0, 0
        self._accumulators: list[ActivationAccumulator] = []
        self._is_traced = False
        self._hooks, self._outer_hooks = HookSet(), HookSet()
        self._tracing: tuple[Any, Any] | None = None  # configuration of torch.compile, and its earlier value
        self._model, self._limit = model, max_elements
        self._sums = SharedSums(kernels.select_backend(kernel))
        self.functions: FunctionAccumulators | None = None
        self.readers = OutputReaders()
        self._offer: Callable[[tuple[ActivationInfo, ...]], bool] | None = None
        self._called: dict[nn.Module, None] = {}  # outermost modules
        self._order: dict[ActivationInfo, float] = {}
        infos: list[ActivationInfo] = []
        channels_first: bool | None = None
        for i, (name, module) in enumerate(named_modules(model)):
            if isinstance(module, (*_CHANNELS_FIRST, *_FEATURES_LAST)):
                channels_first = isinstance(module, _CHANNELS_FIRST)
            rules = rules_of(module)
            if rules is not None and takes_hooks(module):
                infos.append(ActivationInfo(name=name, module_type=type(module).__name__))
                self._order[infos[-1]] = i
                accumulator = self._new_accumulator(rules, channels_first=channels_first)
                self._accumulators.append(accumulator)
                hook = inert_hook(partial(_after_forward, self, accumulator), is_compiled=True)
                self._hooks.register.append(partial(module.register_forward_hook, hook))
        for root in model.values() if isinstance(model, Mapping) else [model]:
            root = getattr(root, "_orig_mod", root)  # inside torch.compile, to be traced with the rest
            hook = inert_hook(partial(_before_forward, self, self._accumulators), is_compiled=True)
            if takes_hooks(root):
                self._hooks.register.append(partial(root.register_forward_pre_hook, hook))
        self.infos = tuple(infos)
        self._hooks.attach()  # now, so that the first compiled call traces them

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove all hooks from the model."""
        self._disarm()
        for hooks in (self._hooks, self._outer_hooks):
            hooks.register.clear()
            hooks.remove()
        self.readers.clear()

    def find_functions(self, offer: Callable[[tuple[ActivationInfo, ...]], bool]) -> None:
        """Watch functional activations too.

        Args:
            offer: Called with all `infos`, once, after the first step, if that step called functional activations. It
                returns whether there is room for them. Without room, they are not watched.
        """
        self._offer = offer
        self.functions = FunctionAccumulators(self._model, self._sums, self._new_accumulator, is_open=True)
        self._inspect_outermost()

    def expect(self, infos: tuple[ActivationInfo, ...]) -> None:
        """Watch exactly the activations of a history that has begun."""
        if set(self.infos) <= set(infos):  # else the model has other modules than the history
            own = dict(zip(self.infos, self._accumulators, strict=True))
            found = {info: self._new_accumulator() for info in infos if info not in own}
            self.infos, self._accumulators = infos, [own.get(info) or found[info] for info in infos]
            self.functions = None
            if found:
                self.functions = FunctionAccumulators(
                    self._model, self._sums, self._new_accumulator, found=found, is_open=False
                )
            self._inspect_outermost()

    def _inspect_outermost(self) -> None:
        """Inspect the graphs of the outermost modules from the next call on."""
        self.readers = OutputReaders(reader(self._model) for reader in READERS)
        self._hooks.remove()
        self._outer_hooks.remove()
        self._outer_hooks.register = _outer_hooks(self, hookable_modules(self._model))
        self._attach()

    def _attach(self) -> None:
        self._hooks.attach()
        if self._inspects_outermost:
            self._outer_hooks.attach()

    @property
    def _inspects_outermost(self) -> bool:
        """Return whether anything reads the graphs of the outermost modules."""
        return self.functions is not None or not self.readers.are_over

    def state(self) -> dict[str, Any]:
        """Return the state for further samples as plain data: the watched activations and the state of the readers."""
        return {
            "activations": [dataclasses.asdict(info) for info in self.infos],
            "readers": self.readers.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of `state`, after a call of `expect`."""
        self.readers.restore(state["readers"])

    def arm(self) -> None:
        """Start to accumulate with the next forward call; earlier sums are dropped."""
        self._disarm()  # the previous step may not have been read
        self._attach()
        self.is_armed, self.spent_s, self.depth = True, 0.0, 0
        self._sums.clear()
        for accumulator in self._accumulators:
            accumulator.clear()
        if self.functions:
            self.functions.begin()
        self.readers.begin()
        dynamo = sys.modules.get("torch._dynamo")  # the import takes a second, and torch.compile makes it if needed
        if dynamo is not None and hasattr(dynamo.config, _ONCE_UNDER_CHECKPOINT):
            self._tracing = (dynamo.config, getattr(dynamo.config, _ONCE_UNDER_CHECKPOINT))
            setattr(dynamo.config, _ONCE_UNDER_CHECKPOINT, True)  # `dynamo.config.patch` takes 10x as long

    def pause(self) -> None:
        """Stop accumulating until the next `arm`; `read` returns the statistics of the calls so far."""
        if not self._is_traced:  # a call with hooks takes 5 us longer, but without traced hooks it would recompile
            self._hooks.remove()
            self._outer_hooks.remove()

    def _disarm(self) -> None:
        if self.is_armed:
            self.attempts.conclude(ACTIVATIONS, self._failure, place="hooks of activations")
            self._failure = None
        self.is_armed = False
        if self.functions:
            self.functions.end_forward()
        if self._tracing:
            config, before = self._tracing
            setattr(config, _ONCE_UNDER_CHECKPOINT, before)
            self._tracing = None

    def read(self) -> torch.Tensor | None:
        """Disarm, and return the statistics of the calls since `arm`.

        Returns:
            Tensor of shape (S, A), float32, on the device of the activations, in the order of `catalogue.ACT` and
            `infos`; nan if a statistic does not apply or a module was not called. None if the probe was not armed or
            nothing was called.
        """
        if self.is_armed:
            self._settle()  # before `called`: it may add accumulators
        is_whole = self.is_armed and self._failure is None
        called = [i for i, it in enumerate(self._accumulators) if it.is_called] if is_whole else []
        self._disarm()
        if not called:
            return None
        self.pause()
        row_SA = statistics([self._accumulators[i] for i in called])
        if len(called) == len(self._accumulators):
            return row_SA
        whole_SA = row_SA.new_full((row_SA.shape[0], len(self._accumulators)), math.nan)
        return whole_SA.index_copy_(1, on_device(tuple(called), row_SA.device), row_SA)

    def inspect(self, module: nn.Module, output: Any, inputs: Any) -> None:
        """Read the graph of the output of an outermost module, which had these inputs."""
        # without values it is a trace: of torch.fx, or with tensors on the meta device
        if not self._inspects_outermost or next(tensors_of(output), None) is None:
            return
        self._called[module] = None  # a dict keeps the order
        if self.functions:
            self.functions.read(output)
            self.functions.end_forward()
        self.readers.watch(output, inputs)

    def _new_accumulator(
        self, rules: ActivationRules | None = None, *, channels_first: bool | None = None
    ) -> ActivationAccumulator:
        rules = rules or ActivationRules()
        return ActivationAccumulator(rules, channels_first=channels_first, limit=self._limit, sums=self._sums)

    def _settle(self) -> None:
        """Fix the outermost modules and the functional activations, after the first step."""
        if self._called and 2 * len(self._called) < len(self._outer_hooks.register):  # two hooks for each module
            self._outer_hooks.register = _outer_hooks(self, self._called)
        if self._offer is None or self.functions is None:
            return
        offer, self._offer = self._offer, None  # only once
        self.functions.is_open = False
        if self.functions.found:
            of = dict(zip(self.infos, self._accumulators, strict=True)) | self.functions.found
            order = self._order | self.functions.order
            infos = tuple(sorted(of, key=lambda info: order[info]))
            if offer(infos):
                self.infos, self._accumulators = infos, [of[info] for info in infos]
                return
        self.functions = None

    def dead_units(self) -> list[torch.Tensor | None]:
        """Return the units of each module that never fired, after `read`; None without units or calls."""
        return [accumulator.dead_units() for accumulator in self._accumulators]

    def packed_units(self) -> list[UnitMask | None]:
        """Return `dead_units` on the host, waiting for the device. The next step may overwrite the memory."""
        return [accumulator.packed_units() for accumulator in self._accumulators]

    def attempt(self, action: Callable[..., None], *args: Any) -> None:
        """Read a forward call; after an error, read no other call of the step."""
        if torch.compiler.is_compiling():
            self._is_traced = True
            action(*args)  # torch.compile reports what cannot be traced
        elif self._failure is None:  # else the sums of the step are incomplete
            began = time.perf_counter()
            try:
                action(*args)
                self.spent_s += time.perf_counter() - began
            except Exception as error:  # of any kind: the forward call must go on
                self._failure = error.with_traceback(None)  # its frames would keep tensors alive


def _outer_hooks(probe: ActivationProbe, modules: Iterable[nn.Module]) -> list[Callable[[], RemovableHandle]]:
    """Return the registrations of the hooks before and after modules that may be outermost."""
    return [
        register
        for module in modules
        for register in (
            partial(module.register_forward_pre_hook, inert_hook(partial(_on_enter, probe))),
            partial(module.register_forward_hook, inert_hook(partial(_on_leave, probe, module))),
        )
    ]
