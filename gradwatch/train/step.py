"""Make one optimizer step: accumulate, autocast, unscale, observe, clip, skip, update."""

from __future__ import annotations

import contextlib
import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from gradwatch.config.sections.train import ClipSection
from gradwatch.errors import GradwatchError
from gradwatch.probe.device.dtensor import is_distributed
from gradwatch.probe.device.sync import to_float
from gradwatch.probe.graph.in_place import explain_in_place
from gradwatch.train.objective import Objective
from gradwatch.train.parallel.parts import StandIn
from gradwatch.train.parallel.ranks import Ranks
from gradwatch.train.parallel.wrapper import synchronizing, unwrapped

Batch = tuple[Any, Tensor]
Precision = Literal["fp32", "bf16", "fp16"]
ONE_SAMPLE = "Expected more than 1 value per channel when training"  # torch.nn.functional.batch_norm
UNUSED = "find_unused_parameters"  # the option that the error of DistributedDataParallel suggests
AUTOCAST_DTYPE = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Source(enum.IntEnum):
    """The non-finite part of a rank's step: none, the loss of finite inputs, or loss and inputs."""

    NOTHING = 0
    LOSS = 1
    INPUTS = 2


class Passes(NamedTuple):
    """Result of the forward and backward passes of a step.

    Attributes:
        loss: Mean loss over all counted targets; of all ranks.
        finite: Whether the loss is finite on every rank.
        samples: Samples in the step; of all ranks.
        sources: The non-finite part, by rank; empty with one process.
    """

    loss: float
    finite: bool
    samples: int
    sources: tuple[Source, ...] = ()

    @classmethod
    def joined(cls, rows: Sequence[Sequence[float]]) -> Self:
        """Return the result of all ranks from the row of each, which `Stepper.pass_of_rank` returns."""
        sources = tuple(Source(int(row[1])) for row in rows)
        return cls(math.fsum(row[0] for row in rows), not any(sources), int(sum(row[2] for row in rows)), sources)


@dataclass(slots=True, kw_only=True)  # not frozen: a frozen one takes 5x as long to create, once per step
class StepResult:
    """Result of an optimizer step.

    Args:
        loss: Mean loss over all counted targets of the step; a host number.
        samples: Samples in the step.
        norm: Total L2 norm of the gradient, unscaled, before clipping; nan if it was not computed.
        clipped_norm: Total L2 norm of the gradient after clipping.
        skipped: Whether the update was skipped.
        finite: Whether loss and gradient were finite; with a GradScaler, which handles overflow, only the loss.
        loss_scale: Scale of the GradScaler during the step; 1 without one.
        sources: The non-finite part, by rank; empty with one process.
    """

    loss: float
    samples: int
    norm: float
    clipped_norm: float
    skipped: bool
    finite: bool
    loss_scale: float
    sources: tuple[Source, ...] = ()


@final
@dataclass(slots=True, kw_only=True)
class Stepper:
    """Makes optimizer steps.

    Args:
        model: Called with a batch's inputs; on several ranks, the wrapper of the model.
        objective: The loss, and the weight of each micro-batch of a step.
        optimizer: Updates the parameters.
        scaler: Scales the loss, or None.
        observe: Returns the total norm of the unscaled gradients: the monitor's, or a plain one.
        device: Device of model and batches.
        precision: Format of the forward pass.
        clip: Limit of the gradient, or None.
        on_nonfinite: Action if loss or gradient is not finite.
        ranks: The ranks of the training, or None with one process.
        saving: Returns the context of each forward pass, which decides where its saved tensors are kept.
        passes: Runs the passes of a step instead of `backward`, or None.
    """

    model: nn.Module
    objective: Objective
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | None
    observe: Callable[[], float]
    device: torch.device
    precision: Precision
    clip: ClipSection | None
    on_nonfinite: Literal["skip", "stop", "continue"]
    ranks: Ranks | None = None
    saving: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    passes: Callable[[Stepper, Sequence[Batch]], Passes] | None = None

    def run(self, window: Sequence[Batch]) -> StepResult:
        """Make one optimizer step from the micro-batches of its window."""
        try:
            loss, finite, samples, sources = self.backward(window)
        except RuntimeError as error:
            if self.ranks is None:  # the other ranks would not run it again
                explain_in_place(error, lambda: self.backward(window))
            raise
        norm = clipped = math.nan
        scale = self.scaler.get_scale() if self.scaler else 1.0  # before scaler.update() in _update changes it
        updated = False
        if finite or self.on_nonfinite == "continue":
            if self.scaler:
                self.scaler.unscale_(self.optimizer)
            # after unscale_, before clip: the norms must be those of the loss
            norm = self.observe()
            clipped = self._limit(norm)
            updated = self._update(norm, window)
        if self.device.type != "cpu":
            self.optimizer.zero_grad(set_to_none=True)  # frees scarce device memory; for the CPU see backward
        return StepResult(
            loss=loss,
            samples=samples,
            norm=norm,
            clipped_norm=clipped,
            skipped=not updated,
            # with a scaler, an overflow of the gradient is normal: the scaler skips it and lowers its scale
            finite=finite and (self.scaler is not None or math.isfinite(norm)),
            loss_scale=scale,
            sources=sources,
        )

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        """Return the context of the forward pass."""
        if self.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=AUTOCAST_DTYPE[self.precision])

    def forward(self, inputs: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs and the mean loss of one micro-batch that is on the device."""
        with self.saving(), self.autocast():
            outputs = self._outputs(inputs)
            return outputs, self.objective.loss(outputs, targets)

    def _outputs(self, inputs: Any) -> Any:
        try:
            return self.model(inputs)
        except Exception as error:
            shapes = _shapes(inputs)
            if ONE_SAMPLE in str(error):
                raise GradwatchError(
                    f"model: its BatchNorm cannot normalize one sample, and a batch came with inputs of {shapes}; "
                    "set data.drop_last: true, or another data.batch_size"
                ) from error
            if UNUSED in str(error):
                raise GradwatchError(
                    "train.parallel: ddp needs a gradient for each parameter, and the last step had none for some; "
                    "remove these parameters or set requires_grad=False, or use train.parallel: fsdp2"
                ) from error
            # an error inside torchvision's own model is about the inputs: its traceback does not help the user
            model = unwrapped(self.model)
            if type(model).__module__.startswith("torchvision.") and type(error) is RuntimeError:
                name = type(model).__name__
                raise GradwatchError(
                    f"model: {name} cannot take inputs of {shapes}: {str(error).splitlines()[0]}"
                ) from error
            error.add_note(f"the model was called with inputs of {shapes}")
            raise

    def backward(self, window: Sequence[Batch]) -> Passes:
        """Add up the gradients of a window."""
        if self.passes:
            return self.passes(self, window)
        if self.ranks:
            return self._backward_on_ranks(window, self.ranks)
        total, finite, is_first = 0.0, True, True
        for share, (inputs, targets) in zip(self.objective.shares(window), window, strict=True):
            if not share:
                continue  # every target is ignored: its mean would be 0 / 0
            _, loss = self.forward(*to_device((inputs, targets), self.device))
            value = to_float(loss)
            total += share * value
            if not math.isfinite(value):
                finite = False
                if self.on_nonfinite != "continue":
                    break
            if is_first:
                # not before the forward pass: memory freed here is reused at once, so the allocator does not return
                # it, which saves the CPU page faults (7 % of a step of ResNet-18)
                self.optimizer.zero_grad(set_to_none=True)
                is_first = False
            loss = loss if share == 1.0 else loss * share  # no extra node in the graph without accumulation
            (self.scaler.scale(loss) if self.scaler else loss).backward()
        return Passes(total, finite, _num_samples(window))

    def _backward_on_ranks(self, window: Sequence[Batch], ranks: Ranks) -> Passes:
        counts = self.counts(window)
        rows = [] if self.objective.is_sum else ranks.gather(counts)
        weights = self.weights(counts, rows, ranks.world_size)
        return Passes.joined(ranks.gather(self.pass_of_rank(window, weights, ranks.world_size)))

    def counts(self, window: Sequence[Batch]) -> list[float]:
        """Return the weight of each micro-batch of a rank in the mean over the micro-batches of all ranks."""
        is_real = [not isinstance(batch, StandIn) for batch in window]
        if self.objective.is_sum:
            return [float(real) for real in is_real]
        return [
            self.objective.count(targets) if real else 0.0 for real, (_, targets) in zip(is_real, window, strict=True)
        ]

    def weights(self, counts: Sequence[float], rows: Sequence[Sequence[float]], world_size: int) -> list[float]:
        """Return the factor of the loss of each micro-batch in the average over the ranks.

        The engines average the gradients over the ranks. With these factors, the average is the gradient of the global
        loss.

        Args:
            counts: Counts of the micro-batches of this rank.
            rows: Counts of each rank; not used by a loss that is a sum.
            world_size: Number of ranks.
        """
        total = 1.0 if self.objective.is_sum else math.fsum(count for row in rows for count in row)
        return [world_size * count / total if total else 0.0 for count in counts]

    def pass_of_rank(self, window: Sequence[Batch], weights: Sequence[float], world_size: int) -> list[float]:
        """Take part in the passes of all ranks: each runs every pass, even without targets, or the others would hang.

        Returns:
            The loss in the global loss, the `Source` of a loss that is not finite, and the number of samples.
        """
        part, source = 0.0, Source.NOTHING
        for i, (weight, batch) in enumerate(zip(weights, window, strict=True)):
            with synchronizing(self.model, is_last=i == len(window) - 1):
                inputs, targets = to_device(tuple(batch), self.device)
                if weight:
                    _, loss = self.forward(inputs, targets)
                    value = to_float(loss)
                    part += weight / world_size * value
                    if not math.isfinite(value):
                        source = max(source, Source.LOSS if _is_finite(inputs) else Source.INPUTS)
                    loss = loss * weight
                else:
                    loss = self._zero_loss(inputs)
                if i == 0:
                    self.optimizer.zero_grad(set_to_none=True)
                (self.scaler.scale(loss) if self.scaler else loss).backward()
        return [part, source, sum(0 if isinstance(batch, StandIn) else len(batch[1]) for batch in window)]

    def _zero_loss(self, inputs: Any) -> Tensor:
        """Return a loss of 0 that reaches every parameter that the outputs reach."""
        with self.saving(), self.autocast():
            outputs = tree_leaves(self._outputs(inputs))
        # each element times 0 before the sum, which may overflow
        return sum((o * 0).sum() for o in outputs if isinstance(o, Tensor) and o.requires_grad)  # type: ignore[return-value]  # never empty

    def _limit(self, norm: float) -> float:
        """Clip the gradients, which have the given total norm, and return their norm after clipping."""
        if self.clip is None or not math.isfinite(norm):
            return norm  # scaling by an infinite or nan norm would turn every gradient into 0 or nan
        params = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        if self.clip.value is not None:
            nn.utils.clip_grad_value_(params, self.clip.value)
            total: Any = nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
            return to_float(total.full_tensor() if is_distributed(total) else total)
        assert self.clip.norm is not None, "a clip has a norm or a value"
        if norm > self.clip.norm:
            # with the observed norm, so that it is not computed twice
            nn.utils.clip_grads_with_norm_(params, self.clip.norm, torch.tensor(norm, device=self.device))
        return min(norm, self.clip.norm)

    def _update(self, norm: float, window: Sequence[Batch]) -> bool:
        """Update the parameters unless the gradient is not finite, and return whether they were updated."""
        if self.scaler:
            self.scaler.step(self.optimizer)  # skips the update by itself if a gradient is not finite
            self.scaler.update()
            return math.isfinite(norm)
        if not math.isfinite(norm) and self.on_nonfinite != "continue":
            return False
        if isinstance(self.optimizer, torch.optim.LBFGS):
            # LBFGS requires a closure: its line search needs loss and gradient at several points
            self.optimizer.step(lambda: self.backward(window).loss)
        else:
            self.optimizer.step()
        return True


def _num_samples(window: Sequence[Batch]) -> int:
    return window[0][1].shape[0] if len(window) == 1 else sum(len(targets) for _, targets in window)


def _is_finite(inputs: Any) -> bool:
    floats = [x for x in tree_leaves(inputs) if isinstance(x, Tensor) and x.is_floating_point()]
    return all(to_float(x.isfinite().all()) for x in floats)


def _shapes(inputs: Any) -> str:
    if isinstance(inputs, Tensor):
        return f"shape {tuple(inputs.shape)} and type {inputs.dtype}"
    return f"type {type(inputs).__name__}"


def to_device(batch: Any, device: torch.device) -> Any:
    """Copy the tensors of a batch to the device; a batch nests tuples, lists and dicts."""
    if device.type == "cpu":
        return batch  # data loaders return CPU tensors
    return tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), batch)
