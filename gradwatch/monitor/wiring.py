"""Build a monitor: inspect the models, then attach all hooks in a fixed order."""

from __future__ import annotations

import datetime
import functools
import platform
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradwatch._version import __version__
from gradwatch.attempts import Attempts
from gradwatch.history.store import History
from gradwatch.incident.step_snapshot import StepSnapshotter
from gradwatch.monitor.budget import Schedule
from gradwatch.monitor.monitor import Monitor
from gradwatch.monitor.ranks.directory import rank_and_world_size
from gradwatch.monitor.readings.hand_updates import HandUpdates
from gradwatch.pipeline.pipeline import Pipeline
from gradwatch.probe.activations.probe import ACTIVATIONS, ActivationProbe
from gradwatch.probe.copies.probe import Copies
from gradwatch.probe.device.dtensor import find_shards
from gradwatch.probe.gradients.left_gradients import LeftGradients
from gradwatch.probe.gradients.opposed_optimizers import OpposedOptimizers
from gradwatch.probe.gradients.update_order import UpdateOrder
from gradwatch.probe.gradients.zero_grad import ZeroGradCheck
from gradwatch.probe.inert_hook import Removable, takes_hooks
from gradwatch.probe.inspections import HookedInspection, Inspections
from gradwatch.probe.modules.own_state import OwnStates
from gradwatch.probe.parameters import list_parameters, named_modules
from gradwatch.records import ActivationInfo, RunInfo
from gradwatch.render.own_loop.finding_handler import FindingStop

Models = Mapping[str, nn.Module]
T = TypeVar("T")


class LayoutWriter(Protocol):
    """Writes the layout of the rows to disk; see `gradwatch.history.disk.writer.Writer`."""

    def update_layout(self) -> None:
        """Write the layout again."""
        ...


def probe_activations(models: Models, **options: Any) -> ActivationProbe | None:
    """Return a probe of the activations; None, with a warning, if the models take no hooks.

    Args:
        models: The models by name.
        options: Options of the probe.
    """
    return _or_none(ACTIVATIONS, lambda: ActivationProbe(models, **options), Attempts())


def inspect(
    models: Models,
    optimizers: Sequence[Optimizer],
    *,
    activations: ActivationProbe | None,
    name: str,
    precision: str,
    loss_scaling: bool,
    accumulate: int,
    total_steps: int | None,
    loss_fn: Callable[..., Any] | None = None,
) -> tuple[list[Tensor], RunInfo]:
    """Return the parameters to watch, and the description of the run."""
    params, layers = list_parameters(models, optimizers)  # first: it raises if a parameter has no shape yet
    _warn_of_closed_modules(models)
    rank, world_size = rank_and_world_size()
    info = RunInfo(
        name=name,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        layers=layers,
        activations=activations.infos if activations else (),
        precision=precision,
        loss_scaling=loss_scaling,
        accumulate=accumulate,
        optimizer="+".join(type(o).__name__ for o in optimizers if not isinstance(o, HandUpdates)),
        # a function has a name, and a module only the name of its class
        loss="" if loss_fn is None else str(getattr(loss_fn, "__name__", type(loss_fn).__name__)),
        device=str(params[0].device) if params else "cpu",
        total_steps=total_steps,
        # `resume` names the version of gradwatch if the statistics have changed since
        versions={
            "gradwatch": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        models=tuple(models),
        rank=rank,
        world_size=world_size,
        initial_rates=tuple(_number(group, "initial_lr") for o in optimizers for group in o.param_groups),
        initial_decays=tuple(_number(group, "weight_decay") for o in optimizers for group in o.param_groups),
        shards=find_shards(params) if world_size > 1 else (),
    )
    return list(params), info


def _number(group: Mapping[str, Any], key: str) -> float | None:
    """Return a setting of a group, or None. A scheduler of torch adds `initial_lr`, the rate that it multiplies."""
    value = group.get(key)
    return None if value is None else float(value)


def build_monitor(
    params: Sequence[Tensor],
    pipeline: Pipeline,
    *,
    models: Models,
    optimizers: Sequence[Optimizer],
    activations: ActivationProbe | None,
    layout_writer: LayoutWriter | None,
    scaler: torch.amp.GradScaler | None,
    schedule: Schedule,
    accumulate: int = 1,
    loss_fn: Callable[..., Any] | None = None,
    hooked: bool = True,
    attach: Sequence[Callable[[], Sequence[Removable]]] = (),
    keeper: StepSnapshotter | None = None,
    stop: FindingStop | None = None,
    run_dir: Path | None = None,
) -> Monitor:
    """Return a monitor with all hooks attached in order: probes, inspections, other hooks, optimizers.

    Other arguments as for `Monitor`.

    Args:
        models: The models by name.
        layout_writer: Writes the layout of the history again if it changes, or None.
        loss_fn: The loss function, if it is known.
        attach: Functions that attach further hooks. The hooks are removed with the hooks of the monitor.
    """
    history = pipeline.history
    if activations:
        activations.attempts = pipeline.attempts
    # functions show at the first forward; a resumed run has a layout already
    if activations and not len(history.param):
        find_functions = functools.partial(
            activations.find_functions, functools.partial(lay_out, history, pipeline, layout_writer)
        )
        _or_none("the search for functional activations", find_functions, pipeline.attempts)
    names = {param: layer.name for param, layer in zip(params, history.info.layers, strict=True)}
    # no call of a loop that moves its weights by hand comes between the backward pass and the update
    ordered = [optimizer for optimizer in optimizers if not isinstance(optimizer, HandUpdates)]
    # deferred to `_or_none`, which disables the inspection if a model does not support it
    makers: dict[str, Callable[[], HookedInspection]] = {
        "the check of cleared gradients": functools.partial(ZeroGradCheck, optimizers, pipeline.add_event, names=names),
        "the check of left gradients": functools.partial(LeftGradients, optimizers, pipeline.add_event),
        "the order of updates": functools.partial(UpdateOrder, ordered),
        "the states of the models": functools.partial(
            OwnStates, models, pipeline.add_event, lambda: pipeline.next_step
        ),
        "the gradients of shared weights": functools.partial(
            OpposedOptimizers, optimizers, params, history.info.layers
        ),
        "the copies of the model": functools.partial(Copies, models, optimizers),
    }
    made = {part: _or_none(part, make, pipeline.attempts) for part, make in makers.items() if hooked}
    make_facts = functools.partial(
        Inspections,
        models,
        params=params,
        layers=history.info.layers,
        optimizers=optimizers,
        loss_fn=loss_fn,
        readers=activations.readers if activations else (),
        attempts=pipeline.attempts,
        hooked_updates={part: inspection for part, inspection in made.items() if inspection},
        known=history.events,
        hooked=hooked,
    )
    return Monitor(
        params,
        optimizers=optimizers,
        pipeline=pipeline,
        activations=activations,
        scaler=scaler,
        schedule=schedule,
        accumulate=accumulate,
        facts=_or_none("the inspection of autograd graph and modes", make_facts, pipeline.attempts),
        hooked=hooked,
        # attached after the probes and before the optimizers: arguments are evaluated in order
        hooks=[
            hook
            for attach_hooks in attach
            for hook in _or_none("a hook of the model", attach_hooks, pipeline.attempts) or ()
        ],
        keeper=keeper,
        stop=stop,
        run_dir=run_dir,
    )


def lay_out(
    history: History, pipeline: Pipeline, writer: LayoutWriter | None, activations: tuple[ActivationInfo, ...]
) -> bool:
    """Add columns for the activations that the first step has shown. Return whether the history had room for them."""
    # a row in the queue has the old layout
    is_row_pending = pipeline.next_step > history.step + 1
    has_room = not is_row_pending and history.set_activations(activations)
    if has_room and writer:
        writer.update_layout()
    return has_room


def _warn_of_closed_modules(models: Models) -> None:
    """Warn once about all modules that take no hooks. Gradients, weights and updates need none."""
    outermost: list[str] = []
    parts: set[nn.Module] = set()
    for name, module in named_modules(models):
        if not takes_hooks(module) and module not in parts:
            outermost.append(f"`{name}`" if name else "the model")
            parts.update(module.modules())
    if outermost:
        text = (
            f"hooks cannot be attached to {', '.join(outermost)} (modules of TorchScript take none): gradients, "
            "weights and updates are watched there, but not activations, inputs and modes"
        )
        warnings.warn(f"gradwatch: {text}", RuntimeWarning, stacklevel=4)


def _or_none(part: str, make: Callable[[], T], attempts: Attempts) -> T | None:
    """Return a part of the monitor; None, with a warning, if it does not support these models."""
    try:
        return make()
    except Exception as error:  # a module of an unknown kind: the gradients are watched in any case
        attempts.conclude(part, error, is_last=True)
        return None
