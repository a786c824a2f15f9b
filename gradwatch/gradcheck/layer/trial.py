"""Run fresh copies of a layer on batches of any size that are made from an example of its inputs."""

# B = samples of the example, N = samples of a trial

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from gradwatch.errors import GradwatchError
from gradwatch.gradcheck.layer.recorder import OpRecorder, RecordedOp, run_layer
from gradwatch.gradcheck.stepping.step import eager
from gradwatch.gradcheck.stepping.tensors import is_continuous
from gradwatch.replay.locate.module_stack import ModuleStack
from gradwatch.state.rng import random_state, set_random_state

PRIMES = (5, 7, 3, 11, 13)
"""Batch sizes for a trial: one that divides no other axis, so that a reshape cannot split samples evenly by chance."""


@final
@dataclass(frozen=True, slots=True)
class Pass:
    """A recorded forward pass: the tensors that the layer returned, and its operations."""

    outputs: list[Tensor]
    operations: list[RecordedOp]


@final
class LayerTrial:
    """A layer with an example of its inputs. The layer itself never runs: each trial runs a copy.

    Args:
        module: The layer.
        inputs: Example of its inputs, nested, with at least 2 samples.
        batch_axis: Axis of the samples in the inputs, or None to decide by the layer.

    Attributes:
        axis: Axis of the samples.
        size: Number of samples B of the example.
    """

    def __init__(self, module: nn.Module, inputs: tuple[Any, ...], *, batch_axis: int | None) -> None:
        if any(is_lazy(p) for p in (*module.parameters(), *module.buffers())):
            raise GradwatchError("check_layer: the layer has uninitialized parameters; call it once before the check")
        tensors = [t for t in tree_leaves(inputs) if isinstance(t, Tensor)]
        self.axis = _batch_axis(module) if batch_axis is None else batch_axis
        if not tensors or tensors[0].dim() <= self.axis:
            raise GradwatchError(f"check_layer: expected an input tensor with an axis {self.axis} of samples")
        self.size = tensors[0].shape[self.axis]
        if self.size < 2:
            raise GradwatchError(
                f"check_layer: the input has {self.size} sample along axis {self.axis}, expected at least 2: "
                "a batch of 1 hides most mistakes"
            )
        self.module = module
        self.example = tree_map_only(Tensor, lambda t: t.detach().clone(), inputs)
        self.random = random_state()
        others = [n for t in tensors for a, n in enumerate(t.shape) if a != self.axis_of(t)]
        self.prime = next((p for p in PRIMES if not any(n % p == 0 for n in others)), PRIMES[0])
        sizes = [t.shape.count(self.size) for t in tensors]
        self.is_ambiguous = any(n > 1 for n in sizes)

    def fresh(self, *, training: bool) -> nn.Module:
        """Return a copy of the layer in one of its modes."""
        held = [v for m in self.module.modules() for v in tree_leaves(list(m.__dict__.values()))]
        # torch copies no tensors inside of a graph, such as a hidden state that is kept
        memo: dict[int, Any] = {id(t): t.detach().clone() for t in held if isinstance(t, Tensor) and not t.is_leaf}
        try:
            return copy.deepcopy(self.module, memo).train(training)
        except Exception as error:  # the user's class may refuse for any reason
            raise GradwatchError(f"check_layer: the layer cannot be copied: {error}") from error

    def axis_of(self, tensor: Tensor) -> int | None:
        """Return the axis of the samples of one input, or None if it has none, such as a mask of all samples."""
        if tensor.dim() > self.axis and tensor.shape[self.axis] == self.size:
            return self.axis
        return next((a for a, n in enumerate(tensor.shape) if n == self.size), None)

    def batch(self, samples: int, *, dtype: torch.dtype | None = None) -> tuple[Any, ...]:
        """Return a batch of a given size: samples of the example, each number scaled by a factor between 1/2 and 1.

        The factors keep signs, zeros and limits, so that a probability remains one.
        """
        generator = torch.Generator().manual_seed(0)

        def made(tensor: Tensor) -> Tensor:
            axis = self.axis_of(tensor)
            if axis is not None:
                rows = torch.arange(samples, device=tensor.device) % self.size
                tensor = _scaled(tensor.index_select(axis, rows), generator)
            return _converted(tensor, dtype)

        return tuple(tree_map(lambda t: made(t) if isinstance(t, Tensor) else t, self.example))

    def with_changed_sample(self, batch: tuple[Any, ...], sample: int) -> tuple[Any, ...]:
        """Return a batch of N samples with other values in one of them."""
        generator = torch.Generator().manual_seed(1 + sample)

        def changed(original: Tensor, tensor: Tensor) -> Tensor:
            axis = self.axis_of(original)
            if axis is None:
                return tensor
            tensor = tensor.clone()
            row = tensor.select(axis, sample)
            if is_continuous(tensor):
                row.copy_(_scaled(row, generator))
            else:  # of integers, the values of another sample
                row.copy_(tensor.select(axis, (sample + 1) % tensor.shape[axis]).clone())
            return tensor

        return tuple(tree_map(lambda o, t: changed(o, t) if isinstance(t, Tensor) else t, self.example, batch))

    def run(
        self,
        module: nn.Module,
        inputs: Sequence[Any],
        *,
        keep: bool = False,
        seed: int | None = None,
        lend: bool = False,
        record: bool = True,
    ) -> Pass:
        """Run a copy of the layer.

        Args:
            module: The copy.
            inputs: Its inputs.
            keep: Whether to keep the results of the operations.
            seed: Seed of torch's random generators, or None for the state of the start.
            lend: Whether the layer gets the inputs themselves, not copies.
            record: Whether to record the operations.
        """
        if not lend:
            inputs = tree_map_only(Tensor, lambda t: t.clone(), tuple(inputs))
        modules = ModuleStack(module)
        recorder = OpRecorder(modules, keep=keep)
        self.reset_random(seed)
        with modules, torch.enable_grad(), warnings.catch_warnings(), eager():
            warnings.simplefilter("ignore")
            with recorder if record else nullcontext():
                out = run_layer(module, inputs)
        return Pass([t for t in tree_leaves(out) if isinstance(t, Tensor)], recorder.operations)

    def reset_random(self, seed: int | None = None) -> None:
        """Reset the random generators to their first state, or seed torch's."""
        set_random_state(self.random)
        if seed is not None:
            torch.manual_seed(seed)


def _batch_axis(module: nn.Module) -> int:
    """Return the axis of the samples: 1 for torch's own sequence layers with `batch_first=False`."""
    if not type(module).__module__.startswith("torch."):
        return 0
    flags = [m.batch_first for m in module.modules() if hasattr(m, "batch_first")]
    return 1 if flags and not any(flags) else 0


def _scaled(tensor: Tensor, generator: torch.Generator) -> Tensor:
    if not is_continuous(tensor):
        return tensor
    real = tensor.real.dtype if tensor.is_complex() else tensor.dtype
    factors = 0.5 + 0.5 * torch.rand(tensor.shape, generator=generator, dtype=torch.float64)
    return tensor * factors.to(device=tensor.device, dtype=real)


def _converted(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
