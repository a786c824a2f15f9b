"""`watch`: put a monitor on the model of any training loop."""

from __future__ import annotations

import atexit
import functools
import random
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn

from gradwatch.detect import detectors
from gradwatch.errors import FindingError, GradwatchError
from gradwatch.history.disk.header import Header, Status
from gradwatch.history.disk.writer import Writer, claim_free
from gradwatch.history.store import History
from gradwatch.incident.step_snapshot import StepRecord, StepSnapshotter
from gradwatch.monitor import Monitor, Schedule
from gradwatch.monitor.best_effort import disable_feature
from gradwatch.monitor.readings.autocast_reader import PRECISION, AutocastReader
from gradwatch.monitor.wiring import build_monitor, inspect, probe_activations
from gradwatch.pipeline.pipeline import Pipeline
from gradwatch.probe.device.dtensor import is_distributed
from gradwatch.records import Event, Finding
from gradwatch.render import Sink
from gradwatch.render.own_loop.finding_handler import OnFinding, check_on_finding, make_sink

_open_monitors: weakref.WeakSet[Monitor] = weakref.WeakSet()
"""The hooks of a model keep its monitor alive, and nothing keeps it alive longer than the model."""


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
    record: bool | StepRecord = False,
    on_finding: OnFinding = "print",
) -> Monitor:
    """Watch a model in your own loop; call `monitor.step(loss)` once per optimizer step, after it.

    No other call is needed: the optimizer's own hooks read the gradients. A loop that clips calls `monitor.observe()`
    before it clips, or passes the norm that clipping returned: `monitor.step(loss, grad_norm=norm)`. With several
    optimizers, call `monitor.observe(optimizer)` when the gradients of one are complete.

    If parameters are sharded over processes (FSDP2, tensor parallelism), each process must call this in the same way:
    each reads the statistics of whole tensors. All must measure at the same steps, so sampled statistics follow the
    schedule at any cost, and `record` is ignored.

    The training stays bit-identical, and no failure here stops it: a feature that raises, a full disk included, is
    disabled with one RuntimeWarning. Parameters and groups that are added after this call are not in the history, and
    a warning says so.

    Args:
        model: The model, or several by name (a GAN's generator and discriminator).
        optimizer: The optimizer that moves it, or several. For a wrapper, such as Accelerate's, the inner optimizer is
            watched.
        run: Run directory to write, for `gradwatch diagnose` and TensorBoard; None keeps the history in memory. If it
            contains a run already, the next free name is used (`mine-2`, `mine-3`) and printed to stderr;
            `monitor.run_dir` is the directory in use. If torch.distributed is initialised, only rank 0 writes; all
            other ranks keep their histories in memory, and their `run_dir` is None.
        scaler: The loop's GradScaler, if it has one.
        accumulate: Micro-batches per optimizer step. `monitor.step` may be called for each of them.
        loss_fn: The loss function: its name stands in the run, and where it is a module and the loop hands its loss
            over as a plain number, the autograd graph behind it is read.
        total_steps: Planned optimizer steps, where known.
        schedule: When the sampled statistics are measured.
        detect: Thresholds by kind, as in a config's `detect` section.
        record: Keep what each step began with (batch, random states, weights, optimizer), and write it to
            `incidents/` of the run directory when something critical is found. It copies the model at every step, or
            as often as a `StepRecord` says.
        on_finding: What to do with a finding. `"print"` writes one line to standard error, and a summary at the end;
            `"raise"` raises a `FindingError` in `monitor.step`, within about a second, or in `close`, unless the
            finding is only information; a function is called with the `Finding`, on the monitor's thread; None does
            nothing. If torch.distributed is initialised, only rank 0 prints.

    Returns:
        A monitor. Use it in a `with` statement or call `close()`; otherwise it is closed when Python exits.

    Raises:
        GradwatchError: The run directory cannot be made, a parameter has no shape yet, an optimizer takes no hooks, or
            `on_finding` is none of its values.
    """
    if record and run is None:
        raise GradwatchError("record: incidents are written into a run directory, and there is none; give run=...")
    check_on_finding(on_finding)
    models = dict(model) if isinstance(model, Mapping) else {"": model}
    if is_sharded := any(is_distributed(param) for each in models.values() for param in each.parameters()):
        schedule = replace(schedule, budget=0.0)  # which each process would keep to by its own clock
    optimizers = [_bare(o) for o in ([optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer)]
    loss_scaling = scaler is not None and scaler.is_enabled()
    activations = probe_activations(models) if schedule.activations else None
    params, info = inspect(
        models,
        optimizers,
        activations=activations,
        name=Path(run).name if run else "watch",
        precision="fp16" if loss_scaling else _format(models),
        loss_scaling=loss_scaling,
        accumulate=accumulate,
        total_steps=total_steps,
        loss_fn=loss_fn,
    )
    directory = claim_free(Path(run)) if run and _is_first_rank() else None
    if directory:
        info = replace(info, name=directory.name)
    history = History(info, groups=sum(len(o.param_groups) for o in optimizers))
    if on_finding == "print" and not _is_first_rank():
        on_finding = None
    sink, stop = make_sink(on_finding, directory)
    pipeline, recorder = _pipeline(history, directory, detect, [sink] if sink else [])
    keeper = _keeper(record, directory, models, optimizers=optimizers, scaler=scaler, is_sharded=is_sharded)
    autocast = AutocastReader(functools.partial(_change_precision, history, recorder))
    monitor = build_monitor(
        params,
        pipeline,
        models=models,
        optimizers=optimizers,
        activations=activations,
        layout_writer=recorder,
        scaler=scaler,
        schedule=schedule,
        accumulate=accumulate,
        loss_fn=loss_fn,
        attach=[functools.partial(autocast.attach, models), *([keeper.attach] if keeper else ())],
        keeper=keeper,
        stop=stop,
        run_dir=directory,
    )
    _close_at_exit(monitor)
    return monitor


def _close_at_exit(monitor: Monitor) -> None:
    """Close a monitor when Python exits, unless it is closed or freed before."""
    if not _open_monitors:
        atexit.register(_close_monitors)
    _open_monitors.add(monitor)


def _close_monitors() -> None:
    """Close all monitors that are still open, with the status of a program that ends now."""
    error = getattr(sys, "last_value", None)  # the exception that nothing has handled
    status: Status = "finished"
    if error is not None:
        status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
    for monitor in tuple(_open_monitors):
        try:
            monitor.close(status)
        except FindingError as finding:  # Python ignores what is raised here
            print(f"gradwatch: {finding}", file=sys.stderr)  # noqa: T201


def _is_first_rank() -> bool:
    """Return whether this process is the one of its training that writes a run directory."""
    return not (dist.is_available() and dist.is_initialized() and dist.get_rank())


def _bare(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that makes the updates. A wrapper such as Accelerate's is an uninitialised optimizer.

    Raises:
        GradwatchError: Neither the optimizer nor one that it wraps takes hooks.
    """
    try:
        optimizer.register_step_pre_hook(_nothing).remove()
    except AttributeError:
        inner = getattr(optimizer, "optimizer", None)
        if isinstance(inner, torch.optim.Optimizer):
            return _bare(inner)
        name = type(optimizer).__name__
        raise GradwatchError(
            f"optimizer: {name} takes no hooks; have {name}.__init__ call that of torch.optim.Optimizer"
        ) from None
    return optimizer


def _nothing(*_: object) -> None:
    return None


def _pipeline(
    history: History, directory: Path | None, detect: Mapping[str, Mapping[str, Any]] | None, sinks: Sequence[Sink]
) -> tuple[Pipeline, BestEffortWriter | None]:
    """Return the pipeline of a run, and its writer if there is a run directory."""
    asked = detectors(detect)
    if not directory:
        return Pipeline(history, detectors=asked, sinks=sinks, writer=None), None
    writer = BestEffortWriter(directory, history)
    return Pipeline(history, detectors=asked, sinks=[*_sinks(directory), *sinks], writer=writer), writer


def _keeper(
    record: bool | StepRecord,
    directory: Path | None,
    models: Mapping[str, nn.Module],
    *,
    optimizers: Sequence[torch.optim.Optimizer],
    scaler: torch.amp.GradScaler | None,
    is_sharded: bool,
) -> StepSnapshotter | None:
    """Return the recorder of the state before each step, if it was asked for."""
    if not record or not directory:
        return None
    if is_sharded:  # a copy of the whole state takes all processes
        text = "no incident is recorded of a model whose parameters are spread over processes"
        warnings.warn(f"gradwatch: {text}", RuntimeWarning, stacklevel=3)
        return None
    settings = record if isinstance(record, StepRecord) else StepRecord()
    return StepSnapshotter(directory, models, optimizers=optimizers, scaler=scaler, settings=settings)


def _sinks(directory: Path) -> list[Sink]:
    """Return the sinks that write to the run directory. They are imported here, since rich draws a random number."""
    state = random.getstate()
    from gradwatch.render.report.sink import Html
    from gradwatch.render.tensorboard.sink import TensorBoard

    random.setstate(state)
    return [TensorBoard(directory=directory), Html(directory=directory)]


def _format(models: Mapping[str, nn.Module]) -> str:
    """Return the format of most parameters, which is used by the forward pass unless autocast changes it."""
    counts = Counter(p.dtype for model in models.values() for p in model.parameters())
    return PRECISION.get(max(counts, key=lambda dtype: counts[dtype]), "fp32") if counts else "fp32"


@final
class BestEffortWriter:
    """Writes a run to disk until that fails: then it warns once, and training continues.

    Args:
        directory: The run directory.
        history: What is written.

    Raises:
        RunError: The directory holds a run, or cannot be written.
    """

    def __init__(self, directory: Path, history: History) -> None:
        self.warned: set[str] = set()
        self._directory = directory
        self._history = history
        self._writer = Writer(directory, history)

    def append(self) -> None:
        """Write the newest step of the history."""
        self._attempt(self._writer.append)

    def report(self, finding: Finding) -> None:
        """Write a finding."""
        self._attempt(functools.partial(self._writer.report, finding))

    def add_event(self, event: Event) -> None:
        """Write an event."""
        self._attempt(functools.partial(self._writer.add_event, event))

    def close(self, status: Status) -> None:
        """Write how the run ended, and close its files."""
        self._attempt(functools.partial(self._writer.close, status), always=True)

    def update_layout(self) -> None:
        """Write the layout of the history's rows."""
        self._attempt(self._writer.update_layout)

    def rewrite_header(self) -> None:
        """Write the description of the run again."""
        self._attempt(lambda: Header.of(self._history, "running").write(self._directory))

    def _attempt(self, action: Callable[[], None], *, always: bool = False) -> None:
        if self.warned and not always:
            return
        try:
            action()
        except (GradwatchError, OSError) as error:
            disable_feature(self, f"writing to {self._directory}", error)


def _change_precision(history: History, recorder: BestEffortWriter | None, precision: str) -> None:
    """Correct the format of the forward pass in the description of the run."""
    if precision != history.info.precision:
        history.info = replace(history.info, precision=precision)
        if recorder:
            recorder.rewrite_header()
