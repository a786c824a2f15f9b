"""Record the shapes, saved tensors, operations and time of each module of a model in a step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle
from torch.utils.module_tracker import ModuleTracker

from gradwatch.planning.ledger import Ledger
from gradwatch.planning.result import ModuleRow, Shapes


@final
class ModuleRecorder:
    """Hooks on every module of a model.

    The rows are of the last micro-batch. A module that runs again in the backward pass, to recompute its activations,
    is recorded in its forward pass alone.

    Args:
        model: The model.
        ledger: Its phase is set: `forward`, `loss` after the outermost module, and `backward`.
        work: Returns the floating-point operations and the moved bytes so far.
        clock: Returns the time in seconds, after waiting for the device; None measures no time.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        ledger: Ledger,
        work: Callable[[], tuple[int, int]],
        clock: Callable[[], float] | None,
    ) -> None:
        self._model = model
        self._ledger, self._work, self._clock = ledger, work, clock
        self._calls = 0
        self._stack: list[_Call] = []
        self._tracker = ModuleTracker()  # knows whether the autograd engine is running
        self._claimed: set[Node] = set()
        self._handles: list[RemovableHandle] = []
        self.rows = self._empty_rows()

    def __enter__(self) -> ModuleRecorder:
        """Attach the hooks."""
        for name, module in self._model.named_modules():
            self._handles += [
                module.register_forward_pre_hook(self._entering(name), with_kwargs=True),
                module.register_forward_hook(self._leave),
            ]
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def saved(self, nbytes: int) -> None:
        """Count a saved tensor for all modules that are running.

        Args:
            nbytes: Bytes that it adds; 0 if its storage is held anyway.
        """
        for call in self._stack:
            row = self.rows[call.name]
            row.saved_bytes += nbytes
            row.saved_tensors += 1
            row.saved_views += not nbytes

    def _empty_rows(self) -> dict[str, ModuleRow]:
        ms = 0.0 if self._clock else math.nan
        return {
            name: ModuleRow(
                name=name,
                type=type(module).__name__,
                parameters=sum(p.numel() for p in module.parameters()),
                forward_ms=ms,
                backward_ms=ms,
            )
            for name, module in self._model.named_modules()
        }

    def _entering(self, name: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            if self._tracker.is_bw:
                return
            if not self._stack:
                if self._ledger.phase in ("backward", "update"):  # a new micro-batch or step
                    self.rows = self._empty_rows()
                    self._calls = 0
                self._ledger.phase = "forward"
            inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            row = self.rows[name]
            row.inputs = row.inputs or _shapes(inputs)
            row.input_bytes += self._ledger.unsaved_bytes(inputs)
            # a recomputation passes each argument as a tensor of its own, and attention asks whether they are the same
            are_distinct = len({id(tensor) for tensor in inputs}) == len(inputs)
            row.order, row.is_repeatable = (self._calls, are_distinct) if row.order < 0 else (row.order, False)
            self._calls += 1
            self._stack.append(
                _Call(
                    name=name,
                    work=self._work(),
                    begin=self._clock() if self._clock else math.nan,
                    inputs=inputs,
                    versions=[tensor._version for tensor in inputs],
                )
            )

        return enter

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._tracker.is_bw:
            return
        call = self._stack.pop()
        outputs = [x for x in tree_leaves(output) if isinstance(x, Tensor)]
        row = self.rows[call.name]
        row.outputs = row.outputs or _shapes(outputs)
        flops, moved_bytes = self._work()
        row.flops += flops - call.work[0]
        row.moved_bytes += moved_bytes - call.work[1]
        row.is_repeatable &= call.versions == [tensor._version for tensor in call.inputs]
        if self._clock:
            row.forward_ms += 1e3 * (self._clock() - call.begin)
            self._time_backward([*(c.name for c in self._stack), call.name], outputs, call.inputs)
        if not self._stack:
            self._claimed.clear()
            self._ledger.phase = "loss"
            for tensor in outputs:
                if tensor.requires_grad:
                    tensor.register_hook(self._begin_backward)

    def _begin_backward(self, grad: Tensor) -> None:
        self._ledger.phase = "backward"

    def _time_backward(self, names: list[str], outputs: list[Tensor], inputs: list[Tensor]) -> None:
        """Measure the nodes of the graph between the outputs and the inputs of a module."""
        clock = self._clock
        assert clock, "called only if time is measured"
        for node in _nodes(outputs, inputs, self._claimed):
            self._claimed.add(node)
            begin: list[float] = []
            node.register_prehook(lambda grads, begin=begin: begin.append(clock()))

            def end(inputs: Any, outputs: Any, begin: list[float] = begin) -> None:
                if begin:
                    spent = 1e3 * (clock() - begin.pop())
                    for name in names:
                        self.rows[name].backward_ms += spent

            node.register_hook(end)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """A running call of a module; `work`, `begin` and `versions` are as it began."""

    name: str
    work: tuple[int, int]
    begin: float
    inputs: list[Tensor]
    versions: list[int]


def _shapes(tensors: list[Tensor]) -> Shapes:
    return tuple(tuple(tensor.shape) for tensor in tensors)


def _nodes(outputs: list[Tensor], inputs: list[Tensor], claimed: set[Node]) -> Iterator[Node]:
    """Yield the nodes of the graph that lead from the outputs to the inputs and are not claimed."""
    seen = claimed | {x.grad_fn for x in inputs if x.grad_fn is not None}
    pending = [x.grad_fn for x in outputs if x.grad_fn is not None]
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            yield node
            pending += [n for n, _ in node.next_functions if n is not None]


def wall_clock(device: torch.device) -> Callable[[], float]:
    """Return a clock that waits for the work of a device."""

    def read() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    return read
