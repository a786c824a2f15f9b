"""Build the live objects of a training from a config, restore a saved state, and make the stepper."""

from __future__ import annotations

import contextlib
import copy
import math
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Self, final

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from gradwatch import build
from gradwatch.config.sections.root import Config
from gradwatch.config.streams import stream_problems
from gradwatch.data import Splits
from gradwatch.errors import CheckpointError, ConfigError, GradwatchError
from gradwatch.monitor import total_norm
from gradwatch.probe.device import dtensor
from gradwatch.probe.device.sync import to_float, to_host
from gradwatch.probe.device.torch_reduce import NUM_STATISTICS
from gradwatch.probe.gradients.statistics import GradientProbe
from gradwatch.records import DataInfo
from gradwatch.train import activation_checkpointing, activation_offloading
from gradwatch.train.batches import Batches
from gradwatch.train.objective import Objective
from gradwatch.train.parallel.parts import Part
from gradwatch.train.parallel.ranks import Ranks
from gradwatch.train.parallel.wrapper import parallelize, unwrapped
from gradwatch.train.step import Stepper
from gradwatch.train.streams.batches import StreamBatches


@dataclass(slots=True, kw_only=True)
class Progress:
    """Progress of the loop: with the random generators, everything that a resume needs besides the live objects.

    Args:
        step: Next optimizer step.
        epoch: Current epoch.
        batch: Batches of the epoch that are done.
        best: Best value of the early-stopping metric so far; lower is better.
        stale: Evaluations since the best value.
        best_val_loss: Lowest validation loss so far, for the checkpoint that is kept as the best.
        elapsed_s: Training time so far, in seconds.
        rewinds: Number of rewinds after critical findings.
        bad: Steps with batches that are skipped; see `train.data_position.Identity`.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    best: float = math.inf
    stale: int = 0
    best_val_loss: float = math.inf
    elapsed_s: float = 0.0
    rewinds: int = 0
    bad: list[list[int]] = field(default_factory=list)

    def update(self, state: Mapping[str, Any]) -> None:
        """Set all fields from a saved state."""
        for name, value in state.items():
            setattr(self, name, value)
        self.bad = [list(identity) for identity in state["bad"]]


@final
@dataclass(slots=True, kw_only=True)
class TrainingState:
    """The live objects of a training.

    Args:
        config: Config that the objects were built from.
        device: Device of model and batches.
        batches: The training data.
        validation: The validation data, or None.
        model: The model, in training mode when built.
        optimizer: Optimizer of the trainable parameters.
        scaler: The GradScaler of fp16, or None.
        schedule: The learning-rate schedule, or None.
        objective: The loss.
        steps_per_epoch: Optimizer steps per epoch; None for a stream, whose length is not known.
        total_steps: Optimizer steps of the run.
        progress: Progress of the training.
        splits: The data that the batches are made of.
        data: Size and kind of the data.
        notes: Sentences about the data that the user has to know before training.
        called: What the forward pass calls: the model, or its wrapper on several ranks.
        ranks: The ranks of the training, or None with one process.
    """

    config: Config
    device: torch.device
    batches: Batches | StreamBatches
    validation: Batches | StreamBatches | None
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | None
    schedule: torch.optim.lr_scheduler.LRScheduler | None
    objective: Objective
    steps_per_epoch: int | None
    total_steps: int
    progress: Progress
    splits: Splits
    data: DataInfo
    notes: tuple[str, ...]
    called: nn.Module
    ranks: Ranks | None = None

    @classmethod
    def build(cls, config: Config, *, ranks: Ranks | None = None, splits: Splits | None = None) -> Self:
        """Build everything that a config names, at the start of its training.

        Args:
            config: The config.
            ranks: The ranks that share the training; by default, this process trains alone, whatever the config says.
            splits: The data, if they are loaded already.
        """
        device = build.device(config.train.device)
        if splits is None:
            with ranks.first_on_each_machine() if ranks else contextlib.nullcontext():  # it may download
                splits = build.splits(config.data)
        batches, validation = _batches(config, splits, ranks)
        model = _moved(build.model(config, splits.spec), device)
        activation_checkpointing.recompute(model, config.train.activation_checkpointing)
        # before the optimizer, which must hold the sharded parameters
        called = parallelize(model, config.train, ranks=ranks, device=device) if ranks else model
        model = unwrapped(called)
        optimizer = build.optimizer(config.optim, model)
        scaler = build.scaler(config, device)
        steps_per_epoch, total_steps = _steps(config, batches)
        per_epoch = steps_per_epoch if config.schedule.per == "epoch" and steps_per_epoch else 1
        schedule = build.schedule(config.schedule, optimizer, length=math.ceil(total_steps / per_epoch))
        loss = build.loss(config, splits.spec)
        return cls(
            config=config,
            device=device,
            batches=batches,
            validation=validation,
            model=model,
            optimizer=optimizer,
            scaler=scaler,
            schedule=schedule,
            objective=Objective(function=loss.to(device) if isinstance(loss, nn.Module) else loss),
            steps_per_epoch=steps_per_epoch,
            total_steps=total_steps,
            progress=Progress(),
            splits=splits,
            data=splits.info(config.data.name or config.data.target or ""),
            notes=splits.notes,
            called=called,
            ranks=ranks,
        )

    @property
    def is_at_epoch_end(self) -> bool:
        """Whether the batches of the current epoch are used up; a stream shows this only when it is read on."""
        return isinstance(self.batches, Batches) and self.progress.batch == len(self.batches)

    def advance(self, micro_batches: int) -> None:
        """Advance the progress by one optimizer step."""
        self.progress.step += 1
        self.pass_batches(micro_batches)

    def pass_batches(self, micro_batches: int) -> None:
        """Advance the data position, into the next epoch at the end of this one."""
        progress = self.progress
        progress.batch += micro_batches
        if self.is_at_epoch_end:
            progress.epoch, progress.batch = progress.epoch + 1, 0

    def state(self) -> dict[str, Any]:
        """Return everything that further steps depend on except the random generators, with the live tensors."""
        model = self.model.state_dict()
        position = {"data": self.batches.state_dict()} if isinstance(self.batches, StreamBatches) else {}
        return position | {
            "progress": asdict(self.progress),
            "model": model,
            # non-persistent buffers, which state_dict leaves out
            "buffers": {name: buffer for name, buffer in self.model.named_buffers() if name not in model},
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict() if self.schedule else None,
            "scaler": self.scaler.state_dict() if self.scaler else None,
        }

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned, in place: parameters stay the same objects.

        Raises:
            CheckpointError: The state does not fit; the message shows the differences.
        """
        try:
            self.model.load_state_dict(state["model"])
            # a copy: on the CPU, load_state_dict keeps the given tensors, and later steps would change them
            self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        except (RuntimeError, ValueError) as error:  # of the model, or of the optimizer
            raise CheckpointError(
                f"the checkpoint does not fit the training: {error}; resume with the run's own config"
            ) from error
        for name, buffer in self.model.named_buffers():
            if name in state.get("buffers", ()):  # a non-persistent buffer; older checkpoints have none
                buffer.copy_(state["buffers"][name])
        if self.schedule and state["schedule"]:
            self.schedule.load_state_dict(state["schedule"])
        if self.scaler and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        self.progress.update(state["progress"])
        if isinstance(self.batches, StreamBatches) and "data" in state:
            self.batches.load_state_dict(state["data"])

    def check_span(self) -> None:
        """Reject a total that is below the steps already made, or beyond the schedule, where OneCycleLR would raise."""
        if self.total_steps < self.progress.step:
            raise GradwatchError(
                f"{self._span_setting}: got {self.total_steps:,} steps, but the run has made {self.progress.step:,}; "
                f"{self.resume_hint}"
            )
        # with per: epoch, the schedule's total_steps counts epochs
        span = getattr(self.schedule, "total_steps", None)
        if span is not None and self.config.schedule.per == "step" and self.total_steps > span:
            raise GradwatchError(
                f"train: got {self.total_steps:,} steps, but the run's {type(self.schedule).__name__} was planned for "
                f"{span:,} and ends there; leave train as it is, or train again from the start"
            )

    @property
    def _span_setting(self) -> str:
        """The setting that determines the length of the run."""
        return "train.steps" if self.config.train.steps else "train.epochs"

    @property
    def resume_hint(self) -> str:
        """Instruction for continuing a run that has made all its steps."""
        return f"to continue, give it more with --set {self._span_setting}=..."

    def compile(self) -> None:
        """Compile the model in place with torch.compile, if the config asks for it."""
        options = self.config.train.compile_options
        if not options:
            return
        try:
            self.model.compile(**options)  # in place: torch.compile(model) would prefix every parameter's name
        except (RuntimeError, ValueError) as error:  # such as an unknown backend
            raise GradwatchError(f"train.compile: {error}") from error

    def stepper(self, observe: Callable[[], float] | None = None) -> Stepper:
        """Return the stepper, which makes the training's optimizer steps.

        Args:
            observe: Returns the total norm of the unscaled gradients; by default computed as in the monitor.
        """
        train = self.config.train
        return Stepper(
            model=self.called,
            objective=self.objective,
            optimizer=self.optimizer,
            scaler=self.scaler,
            observe=observe or (self._sharded_norm if self.is_sharded else _TotalNorm(self.params())),
            device=self.device,
            precision=train.precision,
            clip=train.clip,
            on_nonfinite=train.on_nonfinite,
            ranks=self.ranks,
            saving=self._saving(),
        )

    def _saving(self) -> Callable[[], contextlib.AbstractContextManager[Any]]:
        if not self.config.train.activation_offloading or self.device.type in activation_offloading.HOST_IS_DEVICE:
            return contextlib.nullcontext
        return partial(activation_offloading.in_host_memory, self.model, self.device)

    @property
    def is_sharded(self) -> bool:
        """Whether the parameters are sharded over the ranks."""
        return self.ranks is not None and self.config.train.parallel in ("fsdp2", "hsdp")

    def _sharded_norm(self) -> float:
        return to_float(dtensor.total_norm([p.grad for p in self.params() if p.grad is not None]))

    def params(self) -> list[Tensor]:
        """Return the parameters that the optimizer updates."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def end_workers(self) -> None:
        """End the worker processes of the training and validation data."""
        for batches in (self.batches, self.validation):
            if batches:
                batches.close()


def machine(device: torch.device) -> dict[str, Any]:
    """Return the properties of the machine that the bits of a training depend on, besides its config."""
    return {
        "torch": str(torch.__version__),
        "device": str(device),
        "processor": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def _moved(model: nn.Module, device: torch.device) -> nn.Module:
    """Return a model on a device; a model that is there already stays, since tensors without data cannot be moved."""
    is_there = all(tensor.device.type == device.type for tensor in (*model.parameters(), *model.buffers()))
    return model if is_there and device.index is None else model.to(device)


def _batches(
    config: Config, splits: Splits, ranks: Ranks | None
) -> tuple[Batches | StreamBatches, Batches | StreamBatches | None]:
    section = config.data
    common: dict[str, Any] = {"seed": config.run.seed, "workers": section.workers, "pin_memory": section.pin_memory}
    part = Part(rank=ranks.rank, world_size=ranks.world_size) if ranks else Part()
    of_stream: Callable[..., StreamBatches] = partial(StreamBatches, **common, part=part)
    of_dataset: Callable[..., Batches] = partial(Batches, **common, part=part)
    training: Batches | StreamBatches
    if isinstance(splits.train, IterableDataset):
        if problems := stream_problems(config, has_validation=splits.val is not None):
            raise ConfigError(problems)
        training = of_stream(splits.train, batch_size=section.batch_size, drop_last=section.drop_last)
    else:
        shuffle = section.shuffle is not False
        training = of_dataset(splits.train, batch_size=section.batch_size, shuffle=shuffle, drop_last=section.drop_last)
    if splits.val is None:
        return training, None
    size = section.eval_batch_size or section.batch_size
    # neither shuffled nor cut short: an evaluation counts every sample once
    if isinstance(splits.val, IterableDataset):
        return training, of_stream(splits.val, batch_size=size)
    return training, of_dataset(splits.val, batch_size=size)


def _steps(config: Config, batches: Batches | StreamBatches) -> tuple[int | None, int]:
    """Return the optimizer steps of an epoch, or None if not known, and of the run."""
    if isinstance(batches, StreamBatches):
        assert config.train.steps, "a stream without it has been refused"
        return None, config.train.steps
    steps_per_epoch = math.ceil(len(batches) / config.train.accumulate)  # the last step may have fewer batches
    # the config has exactly one of both
    return steps_per_epoch, config.train.steps or steps_per_epoch * (config.train.epochs or 0)


@final
class _TotalNorm:
    """Computes the norm of all gradients as the monitor does, so that results are bit-identical without watching."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._probe = GradientProbe(params)
        self._out_SL = None
        if params and params[0].device.type == "cpu":  # reuse one output tensor for all steps
            self._out_SL = torch.empty((NUM_STATISTICS, len(params)), dtype=torch.float32, device="cpu")

    def __call__(self) -> float:
        return total_norm(to_host(self._probe.read(out_SL=self._out_SL)))
