"""Trace two training steps, without data or with it, and return the memory of the second."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from gradwatch.planning.ledger import Ledger, Purpose, dense
from gradwatch.planning.modules import ModuleRecorder, wall_clock
from gradwatch.planning.result import Plan
from gradwatch.planning.tracker import StorageTracker, saved_tensors

UNCOUNTED = "not counted: the workspace of operations that are too large to be tried"


def trace(
    run: Callable[[int], float],
    *,
    batch: Any,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    device: torch.device,
    mode: FakeTensorMode | None,
    notes: tuple[str, ...] = (),
    shares: Sequence[Mapping[Purpose, float]] = (),
    has_device_memory: bool = False,
) -> Plan:
    """Run a training step twice and return the memory of the second run, which begins with the optimizer's state.

    Args:
        run: Makes one step: forward and backward passes, and the update. Called with the number of the step, 0 or 1;
            returns the operations of the whole step, as a multiple of those that it ran.
        batch: Nested tensors that the caller holds during the step.
        model: Its tensors are those that the step uses.
        optimizer: Makes the update; or None.
        device: Device to count on.
        mode: Mode of the model's tensors if they have no data, or None to run with real ones and measure time.
        notes: Sentences on what the plan leaves out.
        shares: As in `Ledger`.
        has_device_memory: Whether the planned device has its own memory, like a GPU.
    """
    ledger = Ledger(device=device.type, shares=shares)
    for parameter in model.parameters():
        ledger.label(parameter, Purpose.WEIGHTS)
    for buffer in model.buffers():
        ledger.label(buffer, Purpose.BUFFERS)
    for tensor in tree_leaves(batch):
        if isinstance(tensor, Tensor):
            ledger.add(tensor)
    _label_state(ledger, optimizer)
    tracker = StorageTracker(ledger)
    recorder = ModuleRecorder(
        model,
        ledger=ledger,
        work=lambda: (tracker.flops, tracker.moved_bytes),
        clock=None if mode else wall_clock(device),
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(_older_objects_frozen())
        stack.enter_context(warnings.catch_warnings())
        # tensors that `save: matmuls` keeps count like any other tensor
        warnings.filterwarnings("ignore", message="A saved_tensors_hooks context")
        stack.enter_context(_labelled(ledger, model, optimizer))
        stack.enter_context(recorder)
        if mode:
            if optimizer and has_device_memory:
                stack.enter_context(_updates_by_foreach(optimizer))
            stack.enter_context(mode)
        stack.enter_context(tracker)
        stack.enter_context(saved_tensors(ledger, recorder.saved))
        run(0)
        gc.collect()  # first calls leave frames in reference cycles, which hold tensors
        ledger.restart()
        before, moved_before, host_before = tracker.flops, tracker.moved_bytes, tracker.host_bytes
        times = run(1)
    return Plan(
        peak_bytes=ledger.peak,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        parts={part.value: nbytes for part, nbytes in ledger.largest.items()},
        modules=tuple(recorder.rows.values()),
        at_peak={part.value: nbytes for part, nbytes in ledger.at_peak.items()},
        phase=ledger.peak_phase,
        flops=round(times * (tracker.flops - before)),
        moved_bytes=round(times * (tracker.moved_bytes - moved_before)),
        host_bytes=round(times * (tracker.host_bytes - host_before)),
        device=device.type,
        is_traced=mode is not None,
        shared_peaks=tuple(ledger.shared_peaks),
        notes=(*notes, UNCOUNTED) if tracker.has_uncounted else notes,
    )


@contextlib.contextmanager
def _older_objects_frozen() -> Iterator[None]:
    """Let a garbage collection skip all objects made before a `with` block: looking at torch's takes 0.2 s."""
    if gc.get_freeze_count():  # the caller has frozen its own
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def _labelled(ledger: Ledger, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """Label gradients and optimizer state in a `with` block as they are created."""

    def label_gradient(parameter: Tensor) -> None:
        if parameter.grad is not None:
            ledger.label(parameter.grad, Purpose.GRADIENTS)

    def begin_update(*_: object) -> None:
        ledger.phase = "update"

    def end_update(*_: object) -> None:
        _label_state(ledger, optimizer)

    handles = [
        p.register_post_accumulate_grad_hook(label_gradient)
        for p in model.parameters()
        if p.requires_grad and p.is_leaf
    ]
    if optimizer:
        handles.append(optimizer.register_step_pre_hook(begin_update))
        handles.append(optimizer.register_step_post_hook(end_update))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _updates_by_foreach(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """In a `with` block, update all tensors at once if a group leaves it to torch, as on a GPU.

    Torch would update tensors without data one after another, which needs less memory.
    """
    chosen = [
        group
        for group in optimizer.param_groups
        if group.get("foreach", False) is None and not group.get("fused") and not isinstance(group["lr"], Tensor)
    ]
    for group in chosen:
        group["foreach"] = True
    try:
        yield
    finally:
        for group in chosen:
            group["foreach"] = None


def _label_state(ledger: Ledger, optimizer: torch.optim.Optimizer | None) -> None:
    """Label everything that an optimizer holds, except the parameters, as its state."""
    if optimizer is None:
        return
    parameters = {id(p) for group in optimizer.param_groups for p in group["params"]}
    held: dict[str, Any] = {k: v for k, v in vars(optimizer).items() if k not in ("param_groups", "state")}
    for tensor in tree_leaves([*optimizer.state.values(), held]):
        # an attribute may list the parameters, or their gradients
        if isinstance(tensor, Tensor) and id(tensor) not in parameters:
            for part in dense(tensor):
                ledger.label(part, Purpose.OPTIMIZER)
