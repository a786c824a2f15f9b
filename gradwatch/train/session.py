"""A training in progress: its live objects, where they stand, and how both are saved and restored."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradwatch import build
from gradwatch.attach import inspect
from gradwatch.config.schema import Config, TrainSection
from gradwatch.data import Splits
from gradwatch.detect import detectors
from gradwatch.errors import CheckpointError, GradwatchError
from gradwatch.history.disk import Writer
from gradwatch.history.header import Status
from gradwatch.history.store import History
from gradwatch.monitor import Monitor, Schedule, total_norm
from gradwatch.pipeline import Pipeline
from gradwatch.probe.activations import ActivationProbe
from gradwatch.probe.gradients import GradientProbe
from gradwatch.probe.transfer import to_host
from gradwatch.records import Diagnosis
from gradwatch.render import LogFormat
from gradwatch.train import activation_checkpointing, checkpoint
from gradwatch.train.batches import Batches
from gradwatch.train.step import Clip, Stepper
from gradwatch.train.targets import Objective


@dataclass(slots=True, kw_only=True)
class Progress:
    """Where the loop stands; with the random generators, all that a resume needs beside the live objects.

    Args:
        step: Next optimizer step.
        epoch: Epoch under way.
        batch: Batches of the epoch that are behind it.
        best: Best value of the early-stopping metric so far, where lower is better.
        stale: Evaluations since then.
        best_val_loss: Lowest validation loss so far, for the checkpoint that is kept as the best.
        elapsed_s: Training time behind it.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    best: float = math.inf
    stale: int = 0
    best_val_loss: float = math.inf
    elapsed_s: float = 0.0


@final
class Session:
    """The live objects of a training.

    Args:
        config: What to train.
        directory: The run directory.
        resume: Whether to go on from the last checkpoint in it.
        log_format: As in `train`.
        stack: Where files and hooks are registered to be closed.
    """

    def __init__(
        self, config: Config, directory: Path, *, resume: bool, log_format: LogFormat, stack: contextlib.ExitStack
    ) -> None:
        self.config = config
        self.directory = directory
        self.progress = Progress()
        self.device = build.device(config.train.device)
        splits = build.splits(config.data)
        self.batches, self.validation = _batches(config, splits)
        self.model = build.model(config, splits.spec).to(self.device)
        _checkpoint_activations(self.model, config.train)
        self.optimizer = build.optimizer(config.optim, self.model)
        self.scaler = build.scaler(config, self.device)
        self.steps_per_epoch = math.ceil(len(self.batches) / config.train.accumulate)
        self.total_steps = config.train.steps or self.steps_per_epoch * (config.train.epochs or 0)
        epochs = math.ceil(self.total_steps / self.steps_per_epoch)
        length = self.total_steps if config.schedule.per == "step" else epochs
        self.schedule = build.schedule(config.schedule, self.optimizer, length=length)
        saved = self._restore() if resume else None
        self.pipeline, self.monitor = self._attach(saved, log_format=log_format, stack=stack)
        self.stepper = self._stepper(_on(build.loss(config, splits.spec), self.device))
        _warn_about_batch_norm(self.model, config.train)
        if compile_options := config.train.compile_options:
            _compile(self.model, compile_options)
        if self.progress.step >= self.total_steps:
            warnings.warn(
                f"the run has made all of its {self.total_steps:,} steps; to go on, give it more with --set "
                + ("train.steps=..." if config.train.steps else "train.epochs=..."),
                stacklevel=2,
            )
        if saved:  # last, since building draws random numbers
            checkpoint.set_random_state(saved["random"])

    def save(self, *, best: bool) -> Path:
        """Write a checkpoint of everything that an exact resume needs, and return its folder."""
        state = {
            "progress": asdict(self.progress),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict() if self.schedule else None,
            "scaler": self.scaler.state_dict() if self.scaler else None,
            "history": self.pipeline.history.state(),
            "random": checkpoint.random_state(),
        }
        keep = self.config.train.checkpoint.keep
        return checkpoint.save(self.directory / "checkpoints", state, step=self.progress.step, keep=keep, best=best)

    def close(self, status: Status) -> tuple[Diagnosis, ...]:
        """Let go of the model, end the run for sinks and disk, and return the diagnoses."""
        if self.monitor:
            self.monitor.detach()
        return self.pipeline.close(status)

    def end_workers(self) -> None:
        """End the processes that read ahead: a signal to all of them must not disturb the last checkpoint."""
        for batches in (self.batches, self.validation):
            if batches:
                batches.close()

    def _restore(self) -> dict[str, Any]:
        if checkpoint.newest(self.directory / "checkpoints") is None:
            raise CheckpointError(
                f"{self.directory}: the run ended before its first checkpoint, so there is nothing to go on from; "
                f"train it anew: gradwatch train {self.directory / 'config.yaml'}"
            )
        _, state = checkpoint.load(self.directory / "checkpoints")
        checkpoint.load_model(self.model, state["model"])
        try:
            self.optimizer.load_state_dict(state["optimizer"])
        except ValueError as error:
            raise CheckpointError(
                f"the checkpoint does not fit optim: {error}; resume with the run's own config"
            ) from error
        if self.schedule and state["schedule"]:
            self.schedule.load_state_dict(state["schedule"])
            self._check_span(self.schedule)
        if self.scaler and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        self.progress = Progress(**state["progress"])
        return state

    def _check_span(self, schedule: torch.optim.lr_scheduler.LRScheduler) -> None:
        """Refuse a run longer than its schedule: OneCycleLR would raise on its last step."""
        span = getattr(schedule, "total_steps", None)
        if span is not None and self.config.schedule.per == "step" and self.total_steps > span:
            raise GradwatchError(
                f"train: got {self.total_steps:,} steps, but the run's {type(schedule).__name__} was planned for "
                f"{span:,} and ends there; leave train as it is, or train anew"
            )

    def _attach(
        self, saved: dict[str, Any] | None, *, log_format: LogFormat, stack: contextlib.ExitStack
    ) -> tuple[Pipeline, Monitor | None]:
        """Return the pipeline of the run, and a monitor that feeds it unless watching is off."""
        watch = self.config.watch
        models, optimizers = ({"": self.model}, [self.optimizer]) if watch.enabled else ({}, [])
        activations = None
        if watch.enabled and watch.activations_every:
            activations = ActivationProbe(self.model, max_elements=watch.activation_elements)
        params, info = inspect(
            models,
            optimizers,
            activations=activations,
            name=self.directory.name,
            precision=self.config.train.precision,
            loss_scaling=self.scaler is not None,
            accumulate=self.config.train.accumulate,
            total_steps=self.total_steps,
        )
        if saved:
            recorder, history = Writer.resume(self.directory, step=self.progress.step - 1)
            history.restore(saved["history"])
            history.info = replace(history.info, total_steps=self.total_steps)
        else:
            history = History(info, groups=len(self.optimizer.param_groups))
            recorder = Writer(self.directory, history)
        stack.enter_context(recorder)
        resumed_at = self.progress.step if saved else None
        pipeline = Pipeline(
            history,
            detectors=detectors(self.config.detect) if watch.enabled else (),
            sinks=build.sinks(self.config, self.directory, log_format=log_format, resumed_at=resumed_at),
            recorder=recorder,
        )
        stack.callback(pipeline.end_sinks)  # also after an error: a live view must give the screen back
        if not watch.enabled:
            return pipeline, None
        monitor = Monitor(
            params,
            optimizers=optimizers,
            pipeline=pipeline,
            activations=activations,
            scaler=self.scaler,
            schedule=Schedule(
                updates=watch.updates_every, activations=watch.activations_every, histograms=watch.histograms_every
            ),
        )
        stack.callback(monitor.detach)
        return pipeline, monitor

    def _stepper(self, loss: Callable[..., Any]) -> Stepper:
        train = self.config.train
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        return Stepper(
            model=self.model,
            objective=Objective(function=loss),
            optimizer=self.optimizer,
            scaler=self.scaler,
            observe=self.monitor.observe if self.monitor else partial(_total_norm, GradientProbe(params)),
            device=self.device,
            precision=train.precision,
            clip=Clip(norm=train.clip.norm, value=train.clip.value) if train.clip else None,
            on_nonfinite=train.on_nonfinite,
        )


def _batches(config: Config, splits: Splits) -> tuple[Batches, Batches | None]:
    section = config.data
    make = partial(Batches, seed=config.run.seed, workers=section.workers, pin_memory=section.pin_memory)
    training = make(splits.train, batch_size=section.batch_size, shuffle=section.shuffle, drop_last=section.drop_last)
    if splits.val is None:
        return training, None
    size = section.eval_batch_size or section.batch_size
    return training, make(splits.val, batch_size=size)


def _checkpoint_activations(model: nn.Module, train: TrainSection) -> None:
    choice = train.activation_checkpointing
    if choice == "none":
        return
    if choice == "sqrt":
        activation_checkpointing.sqrt_blocks(model)
    elif choice.every is not None:
        activation_checkpointing.every_blocks(model, choice.every)
    else:
        assert choice.modules, "the config has either"
        activation_checkpointing.matching_modules(model, choice.modules)


def _compile(model: nn.Module, options: dict[str, Any]) -> None:
    try:
        model.compile(**options)
    except (RuntimeError, ValueError) as error:  # such as a backend that is not there
        raise GradwatchError(f"train.compile: {error}") from error


def _total_norm(probe: GradientProbe) -> float:
    """Return the norm as the monitor would, so that watching changes nothing to the last bit."""
    return total_norm(to_host(probe.read()))


def _on(loss: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    return loss.to(device) if isinstance(loss, nn.Module) else loss


def _warn_about_batch_norm(model: nn.Module, train: TrainSection) -> None:
    norms = [name for name, module in model.named_modules() if isinstance(module, _BatchNorm)]
    if train.accumulate > 1 and norms:
        warnings.warn(
            f"train.accumulate: {len(norms)} BatchNorm layers ({norms[0]}, ...) normalise each micro-batch by itself, "
            f"so {train.accumulate} of them are not equal to one full batch; GroupNorm or LayerNorm would be",
            stacklevel=2,
        )
