"""Put a monitor on a model: in the training loop of this package, and with `watch` in anybody's own."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gradwatch
from gradwatch.detect import detectors
from gradwatch.history.disk import Writer
from gradwatch.history.store import History
from gradwatch.monitor import Monitor, Schedule
from gradwatch.pipeline import Pipeline
from gradwatch.probe.activations import ActivationProbe
from gradwatch.probe.layout import describe
from gradwatch.records import RunInfo
from gradwatch.render.tensorboard import TensorBoard


def watch(
    model: nn.Module | Mapping[str, nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    run: str | Path | None = None,
    scaler: torch.amp.GradScaler | None = None,
    accumulate: int = 1,
    loss_fn: Callable[..., Any] | None = None,
    total_steps: int | None = None,
    schedule: Schedule = Schedule(),  # noqa: B008 - frozen
    detect: Mapping[str, Mapping[str, Any]] | None = None,
) -> Monitor:
    """Watch a model in your own loop; call `monitor.step(loss)` at the end of each optimizer step.

    Args:
        model: The model, or several by name (a GAN's generator and discriminator).
        optimizer: The optimizer that moves it, or several.
        run: Run directory to write, which `gradwatch diagnose` and TensorBoard read; None keeps the history in memory.
        scaler: The loop's GradScaler, if it has one.
        accumulate: Micro-batches per optimizer step.
        loss_fn: The loss function, for what its name tells.
        total_steps: Planned optimizer steps, where known.
        schedule: When the sampled statistics are measured.
        detect: Thresholds by kind, as in a config's `detect` section.

    Returns:
        A monitor, to be closed: use it in a `with` statement, or call `close()`.
    """
    models = dict(model) if isinstance(model, Mapping) else {"": model}
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    activations = ActivationProbe(models) if schedule.activations else None
    params, info = inspect(
        models,
        optimizers,
        activations=activations,
        name=Path(run).name if run else "watch",
        precision="fp16" if scaler is not None else "fp32",
        loss_scaling=scaler is not None,
        accumulate=accumulate,
        total_steps=total_steps,
    )
    history = History(info, groups=sum(len(o.param_groups) for o in optimizers))
    recorder = Writer(Path(run), history) if run else None
    pipeline = Pipeline(
        history,
        detectors=detectors(detect),
        sinks=[TensorBoard(directory=Path(run))] if run else [],
        recorder=recorder,
    )
    return Monitor(
        params, optimizers=optimizers, pipeline=pipeline, activations=activations, scaler=scaler, schedule=schedule
    )


def inspect(
    models: Mapping[str, nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    activations: ActivationProbe | None,
    name: str,
    precision: str,
    loss_scaling: bool,
    accumulate: int,
    total_steps: int | None,
) -> tuple[list[Tensor], RunInfo]:
    """Return the parameters to watch, and what their history is a history of."""
    params, layers = describe(models, optimizers)
    info = RunInfo(
        name=name,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        layers=layers,
        activations=activations.infos if activations else (),
        precision=precision,
        loss_scaling=loss_scaling,
        accumulate=accumulate,
        optimizer="+".join(type(o).__name__ for o in optimizers),
        device=str(params[0].device) if params else "cpu",
        total_steps=total_steps,
        versions={
            "gradwatch": gradwatch.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
    )
    return list(params), info
