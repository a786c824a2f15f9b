"""Plan the memory of a training step in a user's own loop: `gradwatch.plan`."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from gradwatch.config.sizes import parse_size
from gradwatch.errors import GradwatchError, raised
from gradwatch.planning.loop_planner import LoopPlanner
from gradwatch.planning.result import Plan
from gradwatch.planning.stand_ins import StandIns, replaced
from gradwatch.planning.trace import trace
from gradwatch.probe.untouched import untouched
from gradwatch.state.rng import preserved_random_state


def plan(
    model: nn.Module,
    step: Callable[..., Any],
    *batch: Any,
    optimizer: torch.optim.Optimizer | None = None,
    budget: int | str | None = None,
) -> Plan:
    """Return the memory that a training step needs, before it runs.

    The step is traced with tensors that have shapes but no data, so a model of any size takes seconds and no memory;
    it may be on the meta device. A step that branches on the values of tensors is run instead, twice, with real
    tensors; then times are measured too. Weights, buffers, optimizer state and random generators stay unchanged.

    Args:
        model: Model that is trained.
        step: Function of the batch that returns the loss. Its backward pass and the update follow, unless the step
            makes them. Gradients are cleared before each step.
        batch: Parts of the batch.
        optimizer: Makes the update; if None, the plan ends with the backward pass.
        budget: Bytes that the step may take, or a size such as `8GB`. If the step takes more, `recomputations` of the
            plan lists modules to recompute.

    Returns:
        The peak, its parts, and a row for each module.

    Raises:
        GradwatchError: The step cannot be traced, and the model has no data to run it with; or a mistake in the call.
    """
    if not isinstance(model, nn.Module):
        raise GradwatchError(f"plan: model is a {type(model).__name__}, expected an nn.Module")
    if not callable(step):
        raise GradwatchError(f"plan: step is a {type(step).__name__}, expected a function of the batch")
    limit = None if budget is None else parse_size(str(budget), key="plan: budget")
    trace_step = functools.partial(_traced, model, step, batch, optimizer)
    try:
        found = trace_step()
    except Exception as error:  # a step may need the values of a tensor without data
        reason = raised(error)
        if any(tensor.is_meta for tensor in model.parameters()):
            raise GradwatchError(
                f"plan: the step cannot be traced without data, and the model has none: {reason}"
            ) from error
        found = _run(model, step, batch, optimizer, reason=reason)
    if limit is None or not found.is_traced:  # each choice would have to run
        return found
    return replace(found, recomputations=LoopPlanner(model, found, trace_step).recomputations(limit))


def _traced(
    model: nn.Module, step: Callable[..., Any], batch: tuple[Any, ...], optimizer: torch.optim.Optimizer | None
) -> Plan:
    """Return the plan of a step that is traced without data."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    stand_ins = StandIns(mode)
    device = _device(model)
    with preserved_random_state(), replaced(model, optimizer, stand_ins.of):
        inputs = stand_ins.of_all(batch)
        return trace(
            _whole_step(model, step, inputs, optimizer),
            batch=inputs,
            model=model,
            optimizer=optimizer,
            device=device,
            mode=mode,
            has_device_memory=device.type == "cuda",
        )


def _run(
    model: nn.Module,
    step: Callable[..., Any],
    batch: tuple[Any, ...],
    optimizer: torch.optim.Optimizer | None,
    *,
    reason: str,
) -> Plan:
    """Return the plan of a step that is run with real tensors."""
    device = _device(model)
    with _preserved(model, optimizer):
        run = _whole_step(model, step, batch, optimizer)
        note = f"the step cannot be traced without data, so it was run ({reason})"
        return trace(run, batch=batch, model=model, optimizer=optimizer, device=device, mode=None, notes=(note,))


def _device(model: nn.Module) -> torch.device:
    devices = [tensor.device for tensor in (*model.parameters(), *model.buffers())]
    return devices[0] if devices and devices[0].type != "meta" else torch.device("cpu")


def _whole_step(
    model: nn.Module, step: Callable[..., Any], batch: tuple[Any, ...], optimizer: torch.optim.Optimizer | None
) -> Callable[[int], float]:
    """Return a function that clears the gradients, runs the step, and adds a missing backward pass or update."""
    updates: list[None] = []

    def run(number: int) -> float:
        updates.clear()
        model.zero_grad(set_to_none=True)
        handle = optimizer.register_step_post_hook(lambda *_: updates.append(None)) if optimizer else None
        try:
            loss = step(*batch)
        finally:
            if handle:
                handle.remove()
        has_run_backward = any(p.grad is not None for p in model.parameters())
        if isinstance(loss, Tensor) and loss.requires_grad and not (has_run_backward or updates):
            loss.sum().backward()  # a sum: the step may be the model itself
        if optimizer and not updates:
            optimizer.step()
        return 1.0

    return run


@contextlib.contextmanager
def _preserved(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """Restore weights, buffers, gradients, random generators and optimizer state at the end of a `with` block."""
    values = [(p, p.detach().clone()) for p in model.parameters()]
    state = copy.deepcopy(optimizer.state_dict()) if optimizer else None
    with preserved_random_state(), untouched(model, list(model.parameters())):
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, value in values:
                    parameter.copy_(value)
            if optimizer and state:
                optimizer.load_state_dict(state)
