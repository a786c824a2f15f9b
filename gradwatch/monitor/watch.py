"""Attach a monitor to the model of any training loop: `watch`."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gradwatch.detect import detectors
from gradwatch.errors import FindingError, is_users, shown_path
from gradwatch.events import SHARDS_LOCAL
from gradwatch.history.ending import Status
from gradwatch.incident.step_snapshot import StepRecord, StepSnapshotter
from gradwatch.monitor import Monitor, Schedule, record_failure
from gradwatch.monitor.calls import calls
from gradwatch.monitor.ranks.directory import open_shared_run
from gradwatch.monitor.ranks.reader import RankReader
from gradwatch.monitor.readings.autocast_reader import PRECISION, AutocastReader
from gradwatch.monitor.readings.hand_updates import hand_updates
from gradwatch.monitor.row import total_norm
from gradwatch.monitor.setup.arguments import Arguments, check_arguments
from gradwatch.monitor.setup.own_sinks import make_sinks
from gradwatch.monitor.setup.run_directory import OpenRun
from gradwatch.monitor.setup.watched_optimizers import WatchedOptimizers, warn_if_watched
from gradwatch.monitor.wiring import build_monitor, inspect, probe_activations
from gradwatch.paths import user_path
from gradwatch.pipeline.pipeline import Pipeline
from gradwatch.pipeline.ranks.alignment import Alignment
from gradwatch.pipeline.ranks.comparison import RankComparison
from gradwatch.pipeline.ranks.shards import ShardJoin
from gradwatch.probe.device.dtensor import shares_batches
from gradwatch.render import Sink
from gradwatch.render.own_loop.finding_handler import OnFinding, make_sink

_open_monitors: weakref.WeakSet[Monitor] = weakref.WeakSet()
"""Monitors to close at exit. Weak: the hooks of a model keep its monitor alive exactly as long as the model."""


def _leave_runs_to_parent() -> None:
    """Abandon all monitors in a forked child, since only the parent writes and ends the runs."""
    # only flags: most children, such as data workers, never step, and the others remove their hooks at the first step
    for monitor in tuple(_open_monitors):
        monitor.abandon()
    _open_monitors.clear()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_leave_runs_to_parent)


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
    resume: bool | int = False,
    overwrite: bool = False,
    sinks: Mapping[str, Mapping[str, Any] | None] | None = None,
) -> Monitor:
    """Watch a model in your own loop. Call `monitor.step(loss)` once after each optimizer step.

    No other call is needed: hooks of the optimizer read the gradients, and the clip functions of torch read them before
    they clip. A loop that clips by hand calls `monitor.observe()` first, or `monitor.observe(optimizer)` with several
    optimizers.

    If parameters are sharded over processes (FSDP2, tensor parallelism), each process should call `watch` with equal
    arguments and with a `run`. Each reads its own shards, and rank 0 joins them from the files of the others, a few
    seconds later. So all processes must measure at equal steps: sampled statistics follow the schedule at any cost.
    `record` is ignored.

    The training stays bit-identical, and no failure of the monitor stops the training. A feature that raises several
    times in a row is disabled with one RuntimeWarning, and so is writing to a full disk. Copies and saved files of the
    model need no gradwatch and are not watched; a pass that traces, exports or transforms the model is left out. Parts
    that are ScriptModules are watched by their gradients, with one warning. Parameters and groups that are added after
    this call are not in the history, and a warning says so.

    Args:
        model: The model, or several models by name (the generator and the discriminator of a GAN).
        optimizer: The optimizer of the model, or several; an empty list if the loop moves the weights by hand. If it is
            a wrapper, such as the optimizer of Accelerate, the inner optimizer is watched. Optimizers that hold none of
            the model's parameters give a warning; one that holds no parameter at all is a finding (`not-optimized`).
        run: Run directory to write, for `gradwatch diagnose` and TensorBoard; None keeps the history in memory. If the
            directory contains a run, the next free name is used (`mine-2`, `mine-3`) and printed to stderr, unless
            `resume` or `overwrite` says otherwise.
            `monitor.run_dir` is the directory in use. If torch.distributed is initialized, rank 0 writes the run, and
            rank `r` writes its own part to `ranks/r` in it. Rank 0 compares the parts, and reports what differs.
        scaler: The GradScaler of the loop, if there is one.
        accumulate: Micro-batches per optimizer step. `monitor.step` may be called for each of them.
        loss_fn: The loss function. Its name is recorded. For a module, the autograd graph of the loss is read even if
            the loop passes a plain number.
        total_steps: Planned optimizer steps, if known.
        schedule: Steps between two measurements of the sampled statistics.
        detect: Thresholds by kind, as in the `detect` section of a config.
        record: Whether to keep the initial state of each step: batch, random states, weights, optimizer. After a
            critical finding, the state is written to `incidents/` of the run directory. This copies the model at every
            step, or as often as a `StepRecord` says.
        on_finding: Action for each finding. `"print"` writes one line to standard error, and a summary at the end.
            `"raise"` raises a `FindingError` in `monitor.step`, within about a second, or in `close`, unless the
            finding is only information. A function is called with the `Finding` on the thread of the monitor. None
            does nothing. If torch.distributed is initialized, only rank 0 prints.
        resume: Whether to continue the run in the directory, after your own checkpoint was loaded. A number is the
            number of optimizer steps that the checkpoint has: recorded steps from there on are deleted. True continues
            after the last recorded step. If there is no run, a new one begins, so a script can always pass it. Model
            and optimizers must match the run. Open findings stay open.
        overwrite: Whether to replace the run in the directory. Other files in the directory are kept.
        sinks: Settings by sink, as in the `sinks` section of a config: `{"wandb": {}}` adds Weights & Biases,
            `{"html": {"enabled": False}}` leaves out the report. The target of `callable` may be a function. A tracker
            that cannot start is left out with a RuntimeWarning. If torch.distributed is initialized, only rank 0 has
            sinks.

    Returns:
        A monitor. Use it in a `with` statement or call `close()`; otherwise it is closed when Python exits.

    Raises:
        GradwatchError: Arguments are wrong (all mistakes at once); a parameter has no shape yet; or the run directory
            cannot be created, continued or replaced.
    """
    calls.add()
    given = check_arguments(**locals())
    warn_if_watched(given.optimizers)
    models = given.models
    if given.is_sharded:
        schedule = replace(schedule, budget=0.0)  # each process would thin by its own clock, at other steps
    optimizers = given.optimizers or hand_updates(models)
    loss_scaling = scaler is not None and scaler.is_enabled()
    with contextlib.ExitStack() as on_error:
        activations = probe_activations(models) if schedule.activations else None
        if activations:
            on_error.callback(activations.close)
        params, info = inspect(
            models,
            optimizers,
            activations=activations,
            name=user_path(run).name if run else "watch",
            precision="fp16" if loss_scaling else _format(models),
            loss_scaling=loss_scaling,
            accumulate=given.accumulate,
            total_steps=given.total_steps,
            loss_fn=loss_fn,
        )
        # after `inspect`, which may raise: no empty directory is left then
        opened = open_shared_run(
            run,
            replace(info, script=_script(), keeps_steps=bool(record) and not given.is_sharded),
            groups=sum(len(o.param_groups) for o in optimizers),
            resume=given.resume,
            overwrite=overwrite,
        )
        on_error.pop_all()
    if activations and opened.is_continued:
        activations.expect(opened.history.info.activations)
    sink, stop = make_sink(None if on_finding == "print" and info.rank else on_finding, opened.directory)
    keeper = _keeper(record, opened.directory, given, optimizers=optimizers, scaler=scaler)
    pipeline = _pipeline(opened, given, [sink] if sink else [])
    monitor = build_monitor(
        params,
        pipeline,
        models=models,
        optimizers=optimizers,
        activations=activations,
        layout_writer=opened.writer,
        scaler=scaler,
        schedule=schedule,
        accumulate=given.accumulate,
        loss_fn=loss_fn,
        attach=[
            lambda: [WatchedOptimizers(given.optimizers)],
            functools.partial(AutocastReader(functools.partial(_change_precision, opened)).attach, models),
            *(part.attach for part in (keeper, _rank_reader(opened, models, optimizers, pipeline)) if part),
        ],
        keeper=keeper,
        stop=stop,
        run_dir=opened.directory,
    )
    _close_at_exit(monitor)
    return monitor


def _script() -> str:
    """Return the path of the user's script, relative if it is below the working directory; empty in a notebook."""
    file = getattr(sys.modules.get("__main__"), "__file__", None) or ""
    return shown_path(str(Path.cwd() / file)) if file.endswith(".py") and is_users(file) else ""


def _close_at_exit(monitor: Monitor) -> None:
    if not _open_monitors:  # one handler closes all monitors; closing twice does no harm
        atexit.register(_close_monitors)
    _open_monitors.add(monitor)


def _close_monitors() -> None:
    """Close all open monitors, with the status of the program at its exit."""
    error = getattr(sys, "last_value", None)  # the unhandled exception
    status: Status = "finished"
    if error is not None:
        status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
    for monitor in tuple(_open_monitors):  # a copy: a weak set may shrink during the loop
        try:
            record_failure(monitor.pipeline, error)
            monitor.close(status)
        except FindingError as finding:  # Python ignores exceptions of exit handlers
            print(f"gradwatch: {finding}", file=sys.stderr)  # noqa: T201


def _pipeline(
    opened: OpenRun,
    given: Arguments,
    sinks: Sequence[Sink],
) -> Pipeline:
    info, ranks, shards = opened.history.info, None, None
    if info.rank == 0:  # the parts of other ranks need neither charts nor a report
        sinks = [*make_sinks(given.sinks, opened.directory, first_step=opened.first_step), *sinks]
        if opened.directory and info.world_size > 1:
            has_own_batches = not shares_batches(given.models.values())
            alignment = Alignment(opened.directory, opened.history)
            ranks = RankComparison(alignment, opened.history, has_own_batches=has_own_batches)
            if info.shards:
                shards = ShardJoin(alignment, opened.history, total_norm)
    pipeline = Pipeline(
        opened.history,
        # shards alone mislead: one without elements looks like a layer without gradient
        detectors=() if info.shards and info.rank else detectors(given.detect),
        sinks=sinks,
        writer=opened.writer,
        first_step=opened.first_step,
        ranks=ranks,
        shards=shards,
    )
    if info.shards and not opened.directory:
        pipeline.add_event(SHARDS_LOCAL.emit(step=opened.first_step, values={"rank": -1}))
    return pipeline


def _rank_reader(
    opened: OpenRun,
    models: Mapping[str, nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    pipeline: Pipeline,
) -> RankReader | None:
    """Return the reader of the data that ranks are compared by, or None without other ranks or files to compare."""
    if not opened.directory or opened.history.info.world_size == 1:
        return None
    return RankReader(models, optimizers, pipeline.add_event, pipeline.attempts, opened.first_step)


def _keeper(
    record: bool | StepRecord,
    directory: Path | None,
    given: Arguments,
    *,
    optimizers: Sequence[torch.optim.Optimizer],
    scaler: torch.amp.GradScaler | None,
) -> StepSnapshotter | None:
    """Return the recorder of the state before each step, or None if `record` is off or nothing can be written."""
    if not record or not directory:
        return None
    if given.is_sharded:  # a copy of the whole state needs all processes
        text = "no incident is recorded of a model whose parameters are spread over processes"
        warnings.warn(f"gradwatch: {text}", RuntimeWarning, stacklevel=3)
        return None
    settings = record if isinstance(record, StepRecord) else StepRecord()
    return StepSnapshotter(directory, given.models, optimizers=optimizers, scaler=scaler, settings=settings)


def _format(models: Mapping[str, nn.Module]) -> str:
    # the forward pass uses the format of most parameters, unless autocast changes it
    counts = Counter(p.dtype for model in models.values() for p in model.parameters())
    return PRECISION.get(max(counts, key=lambda dtype: counts[dtype]), "fp32") if counts else "fp32"


def _change_precision(opened: OpenRun, precision: str) -> None:
    # autocast is known at the first forward, after the description was written
    history = opened.history
    if precision != history.info.precision:
        history.info = replace(history.info, precision=precision)
        if opened.writer:
            opened.writer.rewrite_header()
