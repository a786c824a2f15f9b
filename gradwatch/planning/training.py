"""Plan the training steps of a config and of its variants, from one copy of the data."""

# B = samples of a batch

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map_only

from gradwatch import build
from gradwatch.config.sections.root import Config
from gradwatch.data import Splits
from gradwatch.errors import GradwatchError, raised
from gradwatch.optimizers.adamw8bit import is_compiled, uncompiled_update
from gradwatch.planning.ledger import Purpose, dense
from gradwatch.planning.result import Plan
from gradwatch.planning.trace import trace
from gradwatch.render.common.format import shown_size
from gradwatch.state.rng import preserved_random_state
from gradwatch.train.activation_offloading import HOST_IS_DEVICE, except_weights
from gradwatch.train.blocks import block_names
from gradwatch.train.step import Batch
from gradwatch.train.training_state import TrainingState

Changes = Mapping[str, Any]
"""Settings by dotted key."""

HALF_PRECISION = ("bf16", "fp16")
MICRO_BATCHES = 2
"""Micro-batches of a step to trace: the first fills the gradients, and the second adds to them."""


@final
class ConfigPlanner:
    """Plans a config, and the config with some changes.

    Args:
        load: Returns the config with changes.
        splits: The data, if they are loaded already.

    Raises:
        GradwatchError: The data cannot be built or read.
    """

    def __init__(self, load: Callable[[Changes], Config], *, splits: Splits | None = None) -> None:
        self._load = load
        self._settled: Changes = {}
        self.config = load({})
        self._notes: list[str] = []
        self._on_cpu: dict[str, Any] = {}
        try:
            build.device(self.config.train.device)
        except GradwatchError:
            self._on_cpu = {"train.device": "cpu"}
            self._notes.append(
                f"{self.config.train.device} is not on this machine: planned as on the CPU, where gradients are kept "
                "until the next backward pass, and without the libraries of the device"
            )
        with preserved_random_state():
            self._splits = splits or build.splits(self.config.data)
            training = self._build({}, FakeTensorMode(allow_non_fake_inputs=True))
            self._first = next(iter(training.batches.epoch(0)))
            training.end_workers()
        self.has_device_memory = bool(self._on_cpu) or training.device.type not in HOST_IS_DEVICE
        self.samples = training.data.samples
        self.blocks = block_names(training.model)
        self.trainable = [p for p in training.model.parameters() if p.requires_grad]
        self.has_batch_norm = any(isinstance(module, _BatchNorm) for module in training.model.modules())
        self._plans: dict[str, Plan] = {}

    def settle(self, changes: Changes) -> None:
        """Apply some changes to all later plans."""
        self._settled = {**self._settled, **changes}
        self.config = self._load(self._settled)
        self._plans.clear()

    def plan(self, changes: Changes | None = None) -> Plan:
        """Return the plan of the config with some changes, traced without data if the step allows it.

        Raises:
            GradwatchError: The settings do not fit together, or the step cannot be traced because of the changes.
        """
        changes = changes or {}
        if repr(changes) not in self._plans:
            self._plans[repr(changes)] = self._plan(changes)
        return self._plans[repr(changes)]

    def measure(self) -> Plan:
        """Run two steps of the config with real tensors, and return their memory."""
        with preserved_random_state():
            return self._traced(*self.real_step(), None)

    def real_step(self) -> tuple[TrainingState, list[Batch]]:
        """Return a training with real tensors, and the micro-batches of its first step."""
        training = self._build({}, None)
        return training, list(itertools.islice(training.batches.epoch(0), training.config.train.accumulate))

    def scaled_peaks(self, changes: Changes, shares: Sequence[Mapping[Purpose, float]]) -> tuple[float, ...]:
        """Return the peaks of the config with some changes, if the device held only fractions of the parts."""
        try:
            return self.traced(changes, shares=shares).shared_peaks
        except GradwatchError:
            raise
        except Exception as error:
            raise GradwatchError(f"the step cannot be traced without data: {raised(error)}") from error

    def traced(self, changes: Changes | None = None, *, shares: Sequence[Mapping[Purpose, float]] = ()) -> Plan:
        """Return the plan of the config with some changes, without running it.

        Args:
            changes: Settings by dotted key.
            shares: As in `trace`.

        Raises:
            GradwatchError: The settings do not fit together: a mistake that training would report too.
            Exception: Any error of the step with tensors that have no data. The user's model may raise anything.
        """
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with preserved_random_state():
            training = self._build(changes or {}, mode)
            return self._traced(training, self._window(training, mode), mode, shares=shares)

    def _plan(self, changes: Changes) -> Plan:
        try:
            return self.traced(changes)
        except GradwatchError:
            raise
        except Exception as error:
            reason = raised(error)
        if changes and self.plan().is_traced:  # running it could take more memory than there is
            raise GradwatchError(f"the step cannot be traced with {dict(changes)}: {reason}")
        with preserved_random_state():
            training = self._build(changes, None)
            note = f"the step cannot be traced without data, so it was run ({reason})"
            return self._traced(training, self._window(training, None), None, note=note)

    def _build(self, changes: Changes, mode: FakeTensorMode | None) -> TrainingState:
        # in this process: one batch is read, and workers take seconds to start
        config = self._load({**self._settled, **changes, **self._on_cpu, "data.workers": 0})
        if mode is None:
            return TrainingState.build(config, splits=self._splits)
        # created on the device, because a module cannot move tensors without data
        with mode, torch.device(build.device(config.train.device).type):
            return TrainingState.build(config, splits=self._splits)

    def _window(self, training: TrainingState, mode: FakeTensorMode | None) -> list[Batch]:
        """Return the micro-batches of one step, of the size that the config says, from the first batch of the data."""
        data, wanted = training.config.data, training.config.train.accumulate
        size, first = len(self._first[1]), data.batch_size
        if self.samples:
            first = min(first, self.samples)
            wanted = min(wanted, math.ceil(self.samples / first))

        def resized(tensor: Tensor) -> Tensor:
            if tensor.ndim == 0 or tensor.shape[0] != size:
                return tensor if mode is None else mode.from_tensor(tensor)
            shape = (first, *tensor.shape[1:])
            if mode is None:  # repeats the samples, whose values keep the labels valid
                return tensor[torch.arange(first) % size]
            with mode:
                return torch.empty(shape, dtype=tensor.dtype)

        return [tree_map_only(Tensor, resized, tuple(self._first)) for _ in range(wanted)]

    def _traced(
        self,
        training: TrainingState,
        window: list[Batch],
        mode: FakeTensorMode | None,
        *,
        note: str = "",
        shares: Sequence[Mapping[Purpose, float]] = (),
    ) -> Plan:
        notes = (*self._notes, *([note] if note else []))
        return plan_step(training, window, mode, notes=notes, shares=shares, has_device_memory=self.has_device_memory)


def plan_step(
    training: TrainingState,
    window: Sequence[Batch],
    mode: FakeTensorMode | None,
    *,
    notes: tuple[str, ...] = (),
    shares: Sequence[Mapping[Purpose, float]] = (),
    has_device_memory: bool = False,
) -> Plan:
    """Return the memory of the next step of a training, which is made twice.

    Args:
        training: The training. Its weights and the state of its optimizer move.
        window: Micro-batches of the step.
        mode: As in `trace`.
        notes: As in `trace`.
        shares: As in `trace`.
        has_device_memory: Whether the planned device has its own memory, like a GPU.
    """
    clip = training.config.train.clip
    # larger than the limit, so that the gradient is clipped
    norm = 2 * clip.norm if clip and clip.norm else 1.0
    stepper = training.stepper(lambda: norm)
    if mode and has_device_memory and training.config.train.activation_offloading:
        # saved tensors without data are not offloaded, since no host memory can hold them
        stepper.saving = lambda: except_weights(training.model, _to_nowhere, _from_nowhere)
    training.model.train()

    def run(number: int) -> float:
        # the first step only creates the optimizer's state; all micro-batches after the second are like it
        part = window[: MICRO_BATCHES if number else 1]
        stepper.run(part)
        return len(window) / len(part)

    with uncompiled_update(training.optimizer):
        return trace(
            run,
            batch=window,
            model=training.model,
            optimizer=training.optimizer,
            device=training.device,
            mode=mode,
            notes=(*notes, *_left_out(training)),
            shares=shares,
            has_device_memory=has_device_memory,
        )


def _to_nowhere(tensor: Tensor) -> tuple[torch.device, Tensor]:
    return tensor.device, tensor.to("meta")


def _from_nowhere(packed: tuple[torch.device, Tensor]) -> Tensor:
    device, tensor = packed
    return tensor.to(device)


def _left_out(training: TrainingState) -> list[str]:
    """Return sentences on the memory of a training that its step does not show."""
    config, notes = training.config, []
    if config.train.compile:
        notes.append("train.compile is left out: the step is planned as it runs without it")
    if config.train.parallel != "none":
        notes.append("train.parallel is left out: the step is planned for one process; --ranks N plans one of N ranks")
    if is_compiled(training.optimizer):
        notes.append("the update is compiled: what it takes is counted, and it is not run")
    record = config.watch.record
    if config.watch.enabled and record.enabled:
        weights = sum(p.nbytes for p in (*training.model.parameters(), *training.model.buffers()))
        held = [v for s in training.optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
        state = sum(part.nbytes for tensor in held for part in dense(tensor))
        if (weights + state) / 1e6 <= record.memory_mb:
            notes.append(
                f"not counted: the copy of weights and optimizer to replay a step, {shown_size(weights + state)} of "
                "host memory (watch.record)"
            )
    return notes
