"""Keep a training in progress: its live objects and monitor, and how they are saved, restored and rewound."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Container, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradwatch import build
from gradwatch.config.ineffective import long_warmup
from gradwatch.config.sections.root import Config
from gradwatch.config.sections.train import TrainSection
from gradwatch.config.settings import effective_settings
from gradwatch.data._randomness import seed_of
from gradwatch.detect import detectors
from gradwatch.errors import CheckpointError
from gradwatch.history.disk.writer import Writer
from gradwatch.history.ending import Ending
from gradwatch.history.store import History
from gradwatch.incident import recorder
from gradwatch.incident.recorder import Snapshotter
from gradwatch.monitor import Monitor, Schedule
from gradwatch.monitor.calls import calls
from gradwatch.monitor.wiring import build_monitor, inspect, probe_activations
from gradwatch.pipeline.pipeline import Pipeline
from gradwatch.records import ActivationInfo, Diagnosis, RunInfo
from gradwatch.render import LogFormat
from gradwatch.state.rng import random_state, set_random_state
from gradwatch.train import checkpoint
from gradwatch.train.activation_offloading import HOST_IS_DEVICE
from gradwatch.train.evaluate import check_metrics
from gradwatch.train.parallel import recording, shared_checkpoint
from gradwatch.train.parallel.ranks import Ranks, is_first
from gradwatch.train.training_state import TrainingState, machine

HOOK_VARIANTS = 3
"""Number of ways in which a hook on an activation acts: it reads the first micro-batch, a later one, or none."""


@final
class Session:
    """The live objects of a training.

    Args:
        config: The run's config.
        directory: The run directory.
        resume: Whether to continue from the last checkpoint in the directory.
        log_format: As in `train`.
        stack: Closes the files and removes the hooks at the end.
        rerun: A state to replay from, or an empty mapping for the start of the run. A replay records in memory only,
            without sinks, and without detectors unless `past` is given.
        past: History before the replayed state; detectors continue from it.
        ranks: The ranks that share the training, or None with one process.

    Attributes:
        is_watchful: Whether critical findings must be known before the next step.
    """

    def __init__(
        self,
        config: Config,
        directory: Path,
        *,
        resume: bool = False,
        log_format: LogFormat = "auto",
        stack: contextlib.ExitStack,
        rerun: Mapping[str, Any] | None = None,
        past: History | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.config = config
        self.directory = directory
        self.ranks = ranks
        self.training = training = TrainingState.build(config, ranks=ranks)
        # also after an error: Python's exit would wait for each worker's grace period
        stack.callback(training.end_workers)
        self.device, self.batches, self.validation = training.device, training.batches, training.validation
        self.model, self.optimizer, self.scaler, self.schedule = (
            training.model,
            training.optimizer,
            training.scaler,
            training.schedule,
        )
        self.progress, self.total_steps = training.progress, training.total_steps
        self.is_rerun, self._past = rerun is not None, past
        if not self.is_rerun:
            for note in training.notes:
                warnings.warn(note, stacklevel=2)
        if not (resume or self.is_rerun):  # earlier versions accepted runs whose metric is never measured
            check_metrics(config, training.data)
        self.is_watchful = config.train.on_critical != "continue" and not self.is_rerun
        saved = self._restore() if resume else rerun
        if rerun:  # an empty mapping is the start of the run: nothing to load
            training.load(rerun)
        self.pipeline, self.monitor = self._attach(saved, log_format=log_format, stack=stack)
        self.stepper = training.stepper(self.monitor.observe if self.monitor else None)
        # the state of one rank does not reproduce a step of several
        self.recorder = None if self.is_rerun or ranks else _recorder(config, directory)
        if not self.is_rerun:
            _warn_about_batch_norm(self.model, config.train, ranks)
            _warn_about_warmup(config, training)
            _warn_about_offloading(config.train, self.device)
        training.compile()
        if self.monitor and config.train.compile_options is not None:
            stack.enter_context(_room_for_variants())
        if self.progress.step == self.total_steps and not self.is_rerun:
            warnings.warn(
                f"the run has made all of its {self.total_steps:,} steps; {training.resume_hint}", stacklevel=2
            )
        if saved:  # last, since building the model and optimizer draws random numbers
            self.remember(saved)
        if saved and "random" in saved:
            set_random_state(saved["random"])
        elif ranks and not ranks.is_first:
            # all ranks have built equal weights; from here on, they draw unequal numbers
            torch.manual_seed(seed_of(config.run.seed, self.progress.step, ranks.rank))

    def remember(self, saved: Mapping[str, Any]) -> None:
        """Restore the monitor's state from a saved state."""
        if self.monitor and "monitor" in saved:  # older versions did not save it
            self.monitor.restore(saved["monitor"])

    def state(self) -> dict[str, Any]:
        """Return everything that further steps depend on, with the live tensors, not copies."""
        watched = {"monitor": self.monitor.state()} if self.monitor else {}
        return self.training.state() | {"random": random_state()} | watched

    def save(self, *, best: bool) -> None:
        """Write a checkpoint of everything that an exact resume needs."""
        if self.is_rerun:
            return  # a replay must not change the run directory
        recording.complete_rows(self.pipeline, self.ranks)
        state = self.state() | {"history": self.pipeline.history.state(), "machine": machine(self.device)}
        root, step, keep = self.directory / "checkpoints", self.progress.step, self.config.train.checkpoint.keep
        if self.ranks:
            shared_checkpoint.save(root, state, step=step, keep=keep, best=best, ranks=self.ranks)
        else:
            checkpoint.save(root, state, step=step, keep=keep, best=best)

    def saved_state(self, step: int | None = None) -> dict[str, Any]:
        """Read the newest checkpoint, or the checkpoint of a step; with several ranks, all of them must call it.

        Raises:
            CheckpointError: There is no good checkpoint.
        """
        root = self.directory / "checkpoints"
        if not self.ranks:
            return checkpoint.load(root, step=step)[1]
        return shared_checkpoint.load(root, self.model, self.optimizer, ranks=self.ranks, step=step)[1]

    def rewind(self, *, surviving: Container[str]) -> None:
        """Remove the recorded rows of steps that will run again, from `progress.step` on.

        Args:
            surviving: Kinds of events to keep.
        """
        history = self.pipeline.history
        events = [event for event in history.events if event.kind in surviving]
        history.truncate(self.progress.step - 1)  # it names the last step to keep, progress the next step
        if self.writer:
            self.writer.rewind()
        if self.monitor:
            self.monitor.restart()
        for event in events:
            if event not in history.events:  # truncate kept the events of earlier steps
                self.pipeline.add_event(event)
        self.pipeline.finish()

    def close(self, ending: Ending) -> tuple[Diagnosis, ...]:
        """Detach from the model, end the run for sinks and disk, and return the diagnoses."""
        if self.monitor:
            self.monitor.detach()
        self.pipeline.history.ending = ending
        return self.pipeline.close(ending.status)

    def _restore(self) -> dict[str, Any]:
        if checkpoint.newest(self.directory / "checkpoints") is None:
            raise CheckpointError(
                f"{self.directory}: the run ended before its first checkpoint, so there is nothing to resume; "
                f"train it again: gradwatch train {self.directory / 'config.yaml'}"
            )
        state = self.saved_state()
        self.training.load(state)
        self.training.check_span()  # needs the loaded progress
        return state

    def _attach(
        self, saved: Mapping[str, Any] | None, *, log_format: LogFormat, stack: contextlib.ExitStack
    ) -> tuple[Pipeline, Monitor | None]:
        """Return the pipeline of the run, and a monitor that feeds it unless watching is off."""
        calls.add()
        watch, models, optimizers = self.config.watch, {"": self.model}, [self.optimizer]
        activations = None
        if watch.enabled and watch.activations_every:
            activations = probe_activations(models, max_elements=watch.activation_elements)
        if activations:
            # a resumed history already has its columns, so the probe must watch the same activations
            known = (saved or {}).get("monitor", {}).get("activations", ())
            activations.expect(tuple(ActivationInfo(**info) for info in known))
        params, info = inspect(
            models if watch.enabled else {},
            optimizers if watch.enabled else [],
            activations=activations,
            name=self.directory.name,
            precision=self.config.train.precision,
            loss_scaling=self.scaler is not None,
            accumulate=self.config.train.accumulate,
            total_steps=self.total_steps,
            loss_fn=self.training.objective.function,
        )
        info = replace(
            info,
            data=self.training.data,
            steps_per_epoch=self.training.steps_per_epoch,
            settings=self._settings(),
        )
        # on several ranks, each one records in its own folder
        history, self.writer = self._history(info, saved, folder=recording.part_of(self.directory, self.ranks))
        if self.writer:
            stack.enter_context(self.writer)
        pipeline = self._pipeline(history, log_format=log_format, resumed_at=self.progress.step if saved else None)
        stack.callback(pipeline.end_sinks)  # also after an error: a live view must restore the screen
        if not watch.enabled:
            return pipeline, None
        rank_reader = recording.reader(self.model, self.optimizer, pipeline, self.ranks)
        monitor = build_monitor(  # without hooks on the optimizer: this loop knows when gradients are complete
            params,
            pipeline,
            models=models,
            optimizers=optimizers,
            activations=activations,
            layout_writer=self.writer,
            scaler=self.scaler,
            schedule=Schedule(
                updates=watch.updates_every,
                activations=watch.activations_every,
                histograms=watch.histograms_every,
                # a time budget would make the recorded steps depend on the speed of the machine, and all ranks read
                # the statistics of sharded parameters together
                budget=0.0 if self.config.run.deterministic or self.ranks else watch.budget,
            ),
            hooked=False,
            attach=[rank_reader.attach] if rank_reader else [],
        )
        if monitor.facts:
            self.training.objective.look = monitor.facts.after_loss
        stack.callback(monitor.detach)
        return pipeline, monitor

    def _settings(self) -> dict[str, Any]:
        settings = effective_settings(self.config)
        if self.training.steps_per_epoch is None:  # a remedy must not propose to shuffle a stream
            del settings["data.shuffle"]
        return settings

    def _pipeline(self, history: History, *, log_format: LogFormat, resumed_at: int | None) -> Pipeline:
        """Return the pipeline that ingests the rows; a replay has no sinks, and detectors only with a past."""
        detects = self.config.watch.enabled and (self.writer or self._past)
        if history.info.shards and not is_first(self.ranks):
            detects = None  # shards alone mislead: a shard without elements looks like a layer without gradient
        found_by = detectors(self.config.detect) if detects else ()
        if not self.writer:
            return Pipeline(history, detectors=found_by, sinks=(), writer=None)
        ranks, shards = recording.comparison(self.directory, history, self.ranks)
        return Pipeline(
            history,
            detectors=found_by,
            sinks=build.sinks(self.config, self.directory, log_format=log_format, resumed_at=resumed_at)
            if is_first(self.ranks)
            else (),
            writer=self.writer,
            ranks=ranks,
            shards=shards,
        )

    def _history(
        self, info: RunInfo, saved: Mapping[str, Any] | None, *, folder: Path
    ) -> tuple[History, Writer | None]:
        """Return the history of the run so far and its writer; a replay has no writer."""
        if self._past:
            self._past.info = info
            return self._past, None
        if self.is_rerun:
            history = History(info, groups=len(self.optimizer.param_groups))
            history.start_at(self.progress.step)
            return history, None
        groups = len(self.optimizer.param_groups)
        writer, history = recording.open_history(info, saved, folder=folder, step=self.progress.step, groups=groups)
        return history, writer


@contextlib.contextmanager
def _room_for_variants() -> Iterator[None]:
    """Let torch compile each function of a watched model for as many inputs as without watching.

    torch compiles a function again if its hooks act differently. After 8 times, it warns and leaves the function
    uncompiled. All blocks of a sharded model share one function.
    """
    from torch._dynamo import config

    with config.patch(recompile_limit=HOOK_VARIANTS * config.recompile_limit):
        yield


def _recorder(config: Config, directory: Path) -> Snapshotter | None:
    """Return the recorder that keeps a recent state, or None if neither incidents nor rewinds can need it."""
    record = config.watch.record
    is_exact = config.train.on_critical == "rewind"  # then the results depend on the step of the snapshot
    if not ((config.watch.enabled and record.enabled) or is_exact):
        return None
    rest_s = 0.0 if is_exact else recorder.REST_S  # with a pause in seconds, that step would depend on the clock
    return Snapshotter(directory, every=record.every, memory_mb=record.memory_mb, most=record.incidents, rest_s=rest_s)


def _warn_about_warmup(config: Config, training: TrainingState) -> None:
    """Warn of a warm-up longer than the run if only the data determine the length of the run."""
    if getattr(config.train, f"{config.schedule.per}s") is not None:
        return  # the config alone shows it, and was checked
    per_epoch = training.steps_per_epoch if config.schedule.per == "epoch" and training.steps_per_epoch else 1
    length = math.ceil(training.total_steps / per_epoch)
    for warning in long_warmup(config, length=length):
        warnings.warn(warning, stacklevel=2)


def _warn_about_offloading(train: TrainSection, device: torch.device) -> None:
    if train.activation_offloading and train.device == "auto" and device.type in HOST_IS_DEVICE:
        warnings.warn(
            "train.activation_offloading: has no effect on this machine: train.device: auto found no device with "
            "memory of its own",
            stacklevel=2,
        )


def _warn_about_batch_norm(model: nn.Module, train: TrainSection, ranks: Ranks | None) -> None:
    norms = [name for name, module in model.named_modules() if isinstance(module, _BatchNorm)]
    if train.accumulate > 1 and norms:
        warnings.warn(
            f"train.accumulate: {len(norms)} BatchNorm layers ({norms[0]}, ...) normalize each micro-batch by itself, "
            f"so {train.accumulate} micro-batches do not equal one full batch; with GroupNorm or LayerNorm they do",
            stacklevel=2,
        )
    if ranks and norms and not train.sync_batchnorm:
        warnings.warn(
            f"train.parallel: {len(norms)} BatchNorm layers ({norms[0]}, ...) normalize the part of each rank by "
            "itself; train.sync_batchnorm: true normalizes over all ranks, on GPUs",
            stacklevel=2,
        )
