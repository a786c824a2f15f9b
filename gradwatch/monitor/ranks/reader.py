"""Read the data that only a comparison of ranks needs: local gradients, buffers, random states and samples."""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.hooks import RemovableHandle

from gradwatch.attempts import Attempts
from gradwatch.events import RANK_STATE
from gradwatch.monitor.ranks.changes import ChangeWatch
from gradwatch.monitor.ranks.epochs import EpochWatch
from gradwatch.monitor.ranks.samples import SampleReader
from gradwatch.pipeline.ranks.states import is_due
from gradwatch.probe.device.dtensor import is_distributed
from gradwatch.probe.device.sync import to_float, to_host
from gradwatch.probe.inert_hook import Removable, add_input_hook, inert_hook, remove_hooks, takes_hooks
from gradwatch.records import Event

MAX_TENSORS = 8
MAX_ELEMENTS = 2**20
"""The gradients of the largest parameters up to this size are read, and at most `MAX_TENSORS` of them."""
PART = "the reading for other ranks"


@final
class RankReader:
    """Reads the state of a rank at its first steps and at powers of two, as one event each.

    A gradient is read when autograd has computed it, before any average over the ranks, and again before the update.
    Buffers and random states are read when the forward pass of the model inside of its wrapper begins, and the samples
    of all forward passes up to the second epoch.

    Args:
        models: The models by name.
        optimizers: The optimizers.
        emit: Called with each event.
        attempts: Counts failures.
        first_step: The optimizer step in progress.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        emit: Callable[[Event], None],
        attempts: Attempts,
        first_step: int = 0,
    ) -> None:
        self._emit, self._attempts = emit, attempts
        self._model = _inner(next(iter(models.values())))
        self._optimizer = optimizers[0]
        self._params = _largest(p for group in self._optimizer.param_groups for p in group["params"])
        self._handles: list[RemovableHandle] = []
        self._local: dict[Tensor, Tensor] = {}
        self._values: dict[str, float] = {}
        self._before: Tensor | None = None
        self._samples = SampleReader()
        self._epochs = EpochWatch(self._model, emit, attempts)
        self._weight_changes = ChangeWatch(self._optimizer, emit)
        self._step = first_step

    def attach(self) -> list[Removable]:
        """Attach all hooks, and return what removes them."""
        self._attach_to_gradients()
        self._epochs.attach(self._step)
        hooks: list[Removable] = [self, self._epochs, self._optimizer.register_step_pre_hook(inert_hook(self._end))]
        hooks += self._weight_changes.attach(self._step)
        if takes_hooks(self._model):
            hooks.append(add_input_hook(self._model, self._begin_forward))
            hooks.append(self._model.register_forward_hook(inert_hook(self._end_forward)))
        return hooks

    def remove(self) -> None:
        """Remove the hooks of the gradients, which come and go during the run."""
        remove_hooks(self._handles)
        self._local.clear()

    def _attach_to_gradients(self) -> None:
        # only for the steps that are read: each hook is a call of Python in the backward pass
        if self._is_due and not self._handles:
            self._handles = [p.register_hook(inert_hook(functools.partial(self._read, p))) for p in self._params]
        elif not self._is_due:
            remove_hooks(self._handles)

    @property
    def _is_due(self) -> bool:
        return is_due(self._step)

    def _begin_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not module.training:
            return
        self._attempts.run(PART, functools.partial(self._samples.read, (args, kwargs), step=self._step))
        if self._is_due and "buffers" not in self._values:
            self._attempts.run(PART, self._read_buffers)
            self._before = torch.get_rng_state()

    def _read_buffers(self) -> None:
        buffers = [b for b in self._model.buffers() if b.is_floating_point() and not is_distributed(b)]
        norms = [to_float(torch.linalg.vector_norm(buffer)) for buffer in buffers]
        self._values["buffers"] = math.hypot(*norms)

    def _end_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        before, self._before = self._before, None
        if before is not None and not torch.equal(before, torch.get_rng_state()):
            self._values["random"] = zlib.crc32(to_host(before).tobytes())

    def _read(self, param: Tensor, grad: Tensor) -> None:
        if not is_distributed(grad):
            known = self._local.get(param)  # of an earlier micro-batch
            self._local[param] = grad.detach().clone() if known is None else known + grad.detach()

    def _end(self, *_: Any) -> None:
        self._attempts.run(PART, self._weight_changes.compare)
        if self._is_due:
            self._attempts.run(PART, self._read_gradients)
            self._values |= self._attempts.run(PART, functools.partial(self._samples.values, self._step)) or {}
            if self._values:
                self._emit(RANK_STATE.emit(step=self._step, values=self._values))
        self._local.clear()
        self._values = {}
        self._step += 1
        self._epochs.step = self._weight_changes.step = self._step
        self._attach_to_gradients()

    def _read_moments(self) -> None:
        if type(self._optimizer).__name__ == "ZeroRedundancyOptimizer":  # each rank has the state of some parameters
            return
        states = [self._optimizer.state[p] for p in self._params if p in self._optimizer.state]
        tensors = [t for state in states for t in state.values() if isinstance(t, Tensor) and t.is_floating_point()]
        norms = [
            to_float(torch.linalg.vector_norm(t.detach())) for t in tensors if not is_traceable_wrapper_subclass(t)
        ]
        self._values["moments"] = math.fsum(math.log(norm) for norm in norms if 0 < norm < math.inf)

    def _read_gradients(self) -> None:
        norms = [to_float(torch.linalg.vector_norm(p.detach().double())) for p in self._params]
        self._values["weights"] = math.hypot(*norms)
        self._read_moments()
        if len(self._local) < len(self._params):
            return  # a step without some gradients, such as one of another optimizer
        pairs = [(local.flatten(), p.grad.detach().flatten()) for p, local in self._local.items() if p.grad is not None]
        wide = [(local.double(), reduced.double()) for local, reduced in pairs]
        self._values |= {
            "local": math.fsum(to_float(local @ local) for local, _ in wide),
            "product": math.fsum(to_float(local @ reduced) for local, reduced in wide),
            "reduced": math.fsum(to_float(reduced @ reduced) for _, reduced in wide),
        }


def _inner(model: nn.Module) -> nn.Module:
    # the forward pass of DistributedDataParallel broadcasts the buffers first
    inner = getattr(model, "module", None)
    is_wrapper = isinstance(model, nn.parallel.DistributedDataParallel)
    return inner if is_wrapper and isinstance(inner, nn.Module) else model


def _largest(params: Any) -> list[Tensor]:
    plain = [
        p
        for p in params
        if p.requires_grad and not is_distributed(p) and p.layout == torch.strided and p.numel() <= MAX_ELEMENTS
    ]
    return sorted(plain, key=lambda p: -p.numel())[:MAX_TENSORS]
