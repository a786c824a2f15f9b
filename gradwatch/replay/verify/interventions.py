"""Define interventions: single changes to a recorded step, and the causes that they confirm."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from gradwatch.errors import GradwatchError
from gradwatch.replay.locate import bad_samples
from gradwatch.replay.locate.bad_operation import Located
from gradwatch.replay.restore.restored_step import RestoredStep
from gradwatch.replay.verify.numeric_guard import NumericGuard
from gradwatch.replay.verify.symptom import LARGE, ZERO, StepOutcome, Symptom, observe
from gradwatch.train.reproducible import seed_all
from gradwatch.train.step import Batch
from gradwatch.train.training_state import TrainingState

MAX_OTHERS = 3
"""Number of other batches, and of other random seeds, to try."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Intervention:
    """A change to a step.

    Args:
        text: Description of the change.
        causes: Ids of the causes that are confirmed if the symptom is gone with the change.
        axis: Factor that the change varies: `data`, `state`, `numerics`, `chance`, `mode` or `formula`.
        run: Returns the outcome of the step for each variant; empty if the change does not apply.
    """

    text: str
    causes: tuple[str, ...]
    axis: str
    run: Callable[[], list[StepOutcome]]


def interventions(restored: RestoredStep, symptom: Symptom, located: Located | None) -> Iterator[Intervention]:
    """Yield the changes that apply to a restored step.

    Args:
        restored: The training, restored to the step.
        symptom: The symptom to check for.
        located: The first bad operation, or None if none was located.
    """
    look = functools.partial(observe, restored, symptom)
    yield from _numerics(restored, symptom, look)
    yield from _data(restored, symptom, look, located)
    yield Intervention(
        text="the same batch with the initial weights",
        causes=(),
        axis="state",
        run=lambda: [look(prepare=lambda: _set_initial_weights(restored))],
    )
    yield from _modes(restored, look)
    # not for a value that was bad before the step: no operation made it, so a guard cannot help
    if located and located.place and not located.leaf:
        yield _guarded(located, symptom, look)


def _numerics(restored: RestoredStep, symptom: Symptom, look: Callable[..., StepOutcome]) -> Iterator[Intervention]:
    if restored.config.train.precision == "fp32":
        return
    # zeros in float16 gradients: with a scaler its scale is too low, without a scaler there is none
    low = "low-loss-scale" if restored.training.scaler else "unscaled-half-precision"
    yield Intervention(
        text=f"float32 instead of {restored.config.train.precision}",
        causes=(low,) if symptom.kind in ZERO else ("half-precision-overflow",),
        axis="numerics",
        run=lambda: [look(stepper=restored.stepper(precision="fp32", scaler=None))],
    )
    if restored.training.scaler:
        yield Intervention(
            text="the same format with a loss scale of 1",
            causes=(),
            axis="numerics",
            run=lambda: [look(stepper=restored.stepper(scaler=None))],
        )


def _data(
    restored: RestoredStep, symptom: Symptom, look: Callable[..., StepOutcome], located: Located | None
) -> Iterator[Intervention]:
    # only a large gradient can be the fault of a single batch
    odd = ("odd-batch",) if symptom.kind in LARGE else ()
    if located and (window := _without(restored, located.samples)):
        yield Intervention(
            text=f"without {'sample' if len(located.samples) == 1 else 'samples'} "
            f"{', '.join(map(str, located.samples[:6]))}{', ...' if len(located.samples) > 6 else ''} of the batch",
            causes=("bad-data",) if located.blame.name == "DATA" else (),
            axis="data",
            run=lambda: [look(window=window)],
        )
    yield Intervention(
        text=f"the next {MAX_OTHERS} batches with the same weights",
        causes=odd,
        axis="data",
        run=lambda: [look(window=window) for window in _next_windows(restored)],
    )


def _modes(restored: RestoredStep, look: Callable[..., StepOutcome]) -> Iterator[Intervention]:
    """Yield changes of the parts of the model that differ between training and evaluation."""
    dropouts = [m for m in restored.training.model.modules() if isinstance(m, _DropoutNd) and m.p > 0]
    norms = [m for m in restored.training.model.modules() if isinstance(m, _BatchNorm)]
    if dropouts:  # other seeds are tried only here, since dropout draws random numbers
        yield Intervention(
            text="without dropout",
            causes=(),
            axis="chance",
            run=lambda: [look(prepare=lambda: _set_eval_mode(dropouts))],
        )
        yield Intervention(
            text=f"{MAX_OTHERS} other random seeds",
            causes=(),
            axis="chance",
            run=lambda: [
                look(prepare=functools.partial(seed_all, restored.config.run.seed + 1 + i)) for i in range(MAX_OTHERS)
            ],
        )
    if norms:
        yield Intervention(
            text="BatchNorm with its running statistics",
            causes=(),
            axis="mode",
            run=lambda: [look(prepare=lambda: _set_eval_mode(norms))],
        )


def _guarded(located: Located, symptom: Symptom, look: Callable[..., StepOutcome]) -> Intervention:
    place = located.place

    def run() -> list[StepOutcome]:
        guard = NumericGuard(place)
        outcome = look(under=guard)
        return [outcome] if guard.guarded else []  # without a guard for the operation, the outcome shows nothing

    return Intervention(
        text=f"inputs of {located.name} on line {place.line} clamped 1e-6 away from the singularity",
        causes=("unscalable-nan" if symptom.kind == "loss-scale-collapse" else "singular-formula",),
        axis="formula",
        run=run,
    )


def _set_eval_mode(modules: Sequence[nn.Module]) -> None:
    for module in modules:
        module.eval()


def _without(restored: RestoredStep, rows: Sequence[int]) -> list[Batch] | None:
    """Return the micro-batch of the step without some of its samples, or None if that is impossible."""
    if len(restored.window) != 1 or not rows:  # the positions are relative to one of several micro-batches
        return None
    size = bad_samples.count(restored.window[0])
    if size is None or len(rows) > size // 2:  # most of the batch is bad, so no single samples are to blame
        return None
    kept = [i for i in range(size) if i not in set(rows)]
    inputs, targets = bad_samples.take(restored.window[0], kept)
    return [(inputs, targets)]


def _next_windows(restored: RestoredStep) -> Iterator[list[Batch]]:
    for offset in range(1, MAX_OTHERS + 1):
        # the data may end, or a later batch may be unreadable: fewer batches are tried then
        with contextlib.suppress(GradwatchError, IndexError, StopIteration):
            yield restored.window_at(offset)


def _set_initial_weights(restored: RestoredStep) -> None:
    """Set the model to the initial weights of the run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seed_all(restored.config.run.seed)
        state: dict[str, Any] = TrainingState.build(restored.config).model.state_dict()
    # copied in place: the optimizer and the session hold the same parameters
    with torch.no_grad():
        for name, value in restored.training.model.state_dict().items():
            if isinstance(value, Tensor):
                value.copy_(state[name])
