"""Rank the samples of a recorded step by leaving them out, and say whether data or state make its gradient large."""

# B = samples of a micro-batch, P = parameter tensors

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradwatch.errors import GradwatchError
from gradwatch.probe.device.sync import to_float
from gradwatch.replay.locate.bad_samples import count, take
from gradwatch.replay.restore.restored_step import RestoredStep, restore_step
from gradwatch.replay.samples.sample_gradients import SampleChunks
from gradwatch.replay.verify.symptom import Symptom, observe
from gradwatch.train.step import Batch, to_device

STEPS_BACK = 8
"""Steps back to the earlier weights: before the jump of an update, but in the same phase of the training."""
NUM_OTHER_BATCHES = 3
"""Number of other batches to compare with."""
MAX_LEFT_OUT = 8
"""Maximum number of samples that are left out one by one."""
MIN_FACTOR = 2.0
"""Ratio of the norm to the norm of other batches with earlier weights, below which there is nothing to explain."""

Cause = Literal["data", "state", "both", "either", "none"]
Position = tuple[int, int]
"""Index of a micro-batch, and index of a sample in it."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RankedSample:
    """A sample and its part in the gradient of the step.

    Args:
        index: Index in the training data.
        micro_batch: Micro-batch of the step.
        position: Position in the micro-batch.
        share: Part of the gradient: the projection of the sample's gradient on it; the shares add up to about 1.
        norm_without: Norm of the gradient if this sample is left out; None if it was not tried.
    """

    index: int
    micro_batch: int
    position: int
    share: float
    norm_without: float | None = None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRanking:
    """The samples that make the gradient of a step large, and whether other weights would have helped.

    Args:
        step: The step.
        norm: Norm of its gradient, before clipping.
        other_data: Median norm of other batches with the same weights.
        earlier_step: Step of the earlier weights; None at the first step.
        other_state: Norm of the same batch with the earlier weights.
        usual: Median norm of other batches with the earlier weights.
        cause: Cause of the large norm. `data`: other batches have a usual norm. `state`: earlier weights give a usual
            norm. `both`: the norm is large only for this batch and these weights together. `either`: each of the two
            alone makes it large. `none`: the norm is not larger than with other batches.
        samples: Samples, the largest share first.
        blamed: Indices of the smallest set of samples without which the norm is nearer to the usual norm; may be empty.
        norm_without: Norm without the blamed samples, or None without any.
    """

    step: int
    norm: float
    other_data: float
    earlier_step: int | None
    other_state: float
    usual: float
    cause: Cause
    samples: tuple[RankedSample, ...]
    blamed: tuple[int, ...]
    norm_without: float | None

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


def rank_samples(run: Path, step: int) -> SampleRanking:
    """Rank the samples of a step of a run.

    Args:
        run: The run directory.
        step: The step.

    Raises:
        GradwatchError: The step cannot be restored, or its gradient is not finite.
    """
    with restore_step(run, step) as now:
        norm = _norm(now, now.window)
        if not math.isfinite(norm):
            raise GradwatchError(
                f"--samples: the gradient of step {step} is not finite; gradwatch replay {run} --step {step} --locate "
                "names the operation and its samples"
            )
        other_data = _others(now)
        window, indices = now.window, now.indices
        ranked = [*_shares(now)]
        earlier = max(0, step - STEPS_BACK) if step else None
        other_state, usual = norm, other_data
        if earlier is not None:
            other_state, usual = _earlier(run, earlier, window)
        ranked.sort(key=lambda item: -item[1])
        without = [_norm(now, _without(window, [p])) for p, _ in ranked[:MAX_LEFT_OUT]]
        level = math.sqrt(norm * usual)
        blamed, norm_without = _blamed(now, [p for p, _ in ranked[:MAX_LEFT_OUT]], level)
    samples = tuple(
        RankedSample(
            index=int(indices[m][i]),
            micro_batch=m,
            position=i,
            share=share,
            norm_without=without[n] if n < len(without) else None,
        )
        for n, ((m, i), share) in enumerate(ranked)
    )
    cause = _cause(norm, other_data, other_state, usual)
    return SampleRanking(
        step=step,
        norm=norm,
        other_data=other_data,
        earlier_step=earlier,
        other_state=other_state,
        usual=usual,
        cause=cause,
        samples=samples,
        blamed=tuple(int(indices[m][i]) for m, i in blamed) if cause != "none" else (),
        norm_without=norm_without if cause != "none" else None,
    )


def _norm(restored: RestoredStep, window: Sequence[Batch]) -> float:
    return observe(restored, Symptom(kind="gradient-spike", layer=None, usual_norm=0.0), window=window).norm


def _others(restored: RestoredStep, *, first: int = 1) -> float:
    """Return the median norm of the batches of later steps, with the weights of this one."""
    norms = []
    for offset in range(first, first + NUM_OTHER_BATCHES):
        # the data may end, or a later batch may be unreadable: fewer batches are tried then
        with contextlib.suppress(GradwatchError, IndexError, StopIteration):
            norms.append(_norm(restored, restored.window_at(offset)))
    if not norms:
        raise GradwatchError("--samples: the data have no other batch to compare with")
    return statistics.median(norms)


def _earlier(run: Path, step: int, window: Sequence[Batch]) -> tuple[float, float]:
    """Return the norm of a window with the weights of an earlier step, and the median norm of the batches there."""
    with restore_step(run, step) as then:
        return _norm(then, window), _others(then, first=0)


def _cause(norm: float, other_data: float, other_state: float, usual: float) -> Cause:
    """Return the cause of a large norm: the change that removes half of its excess, on a log scale."""
    if norm < MIN_FACTOR * usual:
        return "none"
    half = math.sqrt(norm * usual)
    by_data, by_state = other_data <= half, other_state <= half
    if by_data and by_state:
        return "both"
    if by_data or by_state:
        return "data" if by_data else "state"
    return "either"


def _blamed(restored: RestoredStep, positions: Sequence[Position], level: float) -> tuple[list[Position], float | None]:
    """Return the fewest of the first samples without which the norm is at most `level`, and the norm without them."""
    for number in range(1, len(positions) + 1):
        window = _without(restored.window, positions[:number])
        if not window:
            break
        norm = _norm(restored, window)
        if norm <= level:
            return [*positions[:number]], norm
    return [], None


def _without(window: Sequence[Batch], left_out: Sequence[Position]) -> list[Batch]:
    """Return the micro-batches without some samples; empty ones are dropped."""
    kept: list[Batch] = []
    for m, batch in enumerate(window):
        rows = [i for i in range(len(batch[1])) if (m, i) not in left_out]
        if rows:
            inputs, targets = take(batch, rows)
            kept.append((inputs, targets))
    return kept


def _shares(restored: RestoredStep) -> Iterator[tuple[Position, float]]:
    """Yield the part of each sample in the gradient of the step."""
    stepper, window = restored.stepper(), restored.window
    objective, model = stepper.objective, stepper.model
    restored.restore()
    try:
        stepper.backward(window)
        total_P = [p.grad.detach().double().clone() for p in _params(model) if p.grad is not None]
        used = [p.grad is not None for p in _params(model)]
        square = math.fsum(to_float((g * g).sum()) for g in total_P)
        scale = stepper.scaler.get_scale() if stepper.scaler else 1.0
        for m, (share, batch) in enumerate(zip(objective.shares(window), window, strict=True)):
            if not share or count(batch) is None:
                continue
            restored.restore()
            inputs, targets = to_device(batch, stepper.device)
            _hold_batch_norms(model, lambda inputs=inputs, targets=targets: stepper.forward(inputs, targets))
            chunks = SampleChunks(lambda x, y: stepper.forward(x, y)[1], (inputs, targets), model=model)
            weights = [share if objective.is_sum else share * w for w in _weights(objective, targets)]
            i = 0
            for chunk_P in chunks:
                grads_P = [g for g, is_used in zip(chunk_P, used, strict=True) if is_used]
                dots = sum((g.double() * t).flatten(1).sum(1) for g, t in zip(grads_P, total_P, strict=True))
                for dot in dots:  # type: ignore[union-attr]  # a tensor: there is a parameter with a gradient
                    yield (m, i), weights[i] * scale * to_float(dot) / square if square else 0.0
                    i += 1
    finally:
        restored.restore()


def _weights(objective: Any, targets: Tensor) -> list[float]:
    """Return the weight of each sample in the mean loss of a micro-batch."""
    total = objective.count(targets)
    return [objective.count(targets[i : i + 1]) / total for i in range(len(targets))]


def _params(model: nn.Module) -> list[Tensor]:
    return [p for p in model.parameters() if p.requires_grad]


def _hold_batch_norms(model: nn.Module, forward: Any) -> None:
    """Fix the statistics of each BatchNorm to those of this micro-batch, so that a sample can run alone."""
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.training]
    if not norms:
        return
    momenta = [m.momentum for m in norms]
    for module in norms:
        module.momentum = 1.0
    with torch.no_grad():
        forward()
    for module, momentum in zip(norms, momenta, strict=True):
        module.momentum = momentum
        module.eval()
