"""Find the operation in which the samples of a batch begin to affect each other."""

# N = samples of the trial, S = samples that are changed, one in each pass

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from gradwatch.gradcheck.broadcasts import BroadcastWatch
from gradwatch.gradcheck.layer.recorder import RecordedOp, alike, run_layer
from gradwatch.gradcheck.layer.result import LayerProperty
from gradwatch.gradcheck.layer.trial import LayerTrial, Pass
from gradwatch.gradcheck.stepping.step import eager
from gradwatch.replay.locate.module_stack import ModuleStack

CHANGED = 3
"""Samples to change, one by one; more would only repeat what these show."""
TOLERANCE = 1e-9
"""Relative change in float64 below which a value counts as unchanged."""
ADVICE = "if axis 1 is that of the samples, pass batch_axis=1"


@final
@dataclass(slots=True)
class Mixing:
    """Operations through which samples affect each other in one mode of the layer.

    Args:
        leaks: Whether one sample of the output changes with another sample of the input.
        mixes: First operation with a result that depends on two samples, or None.
        scatters: First operation, before that, after which no axis keeps the samples apart, or None.
        moves: First operation that puts a sample where another one belongs, or None.
        has_axis: Whether an output has one axis of the samples.
        pairs: Whether an output has several, such as a matrix of similarities.
        is_tested: Whether the outputs changed at all.
    """

    leaks: bool = False
    mixes: RecordedOp | None = None
    scatters: RecordedOp | None = None
    moves: RecordedOp | None = None
    has_axis: bool = False
    pairs: bool = False
    is_tested: bool = False


@final
@dataclass(slots=True)
class _Reach:
    """Which values of one operation's results changed with each sample."""

    operation: RecordedOp
    masks: list[tuple[Tensor, ...]] = field(default_factory=list)

    @property
    def mixes(self) -> bool:
        """Return whether a value changed with two samples."""
        return any(torch.stack(masks).sum(0).max() > 1 for masks in zip(*self.masks, strict=True) if masks[0].numel())

    @property
    def scatters(self) -> bool:
        """Return whether the samples overlap along every axis."""
        return any(not _is_apart(masks) for masks in zip(*self.masks, strict=True))

    def moves(self, samples: int) -> bool:
        """Return whether an axis of the samples has one of them where another one belongs."""
        return any(_is_moved(masks, samples) for masks in zip(*self.masks, strict=True))


def independent_samples(trial: LayerTrial) -> LayerProperty:
    """Judge whether each sample of the output depends on its own sample of the input alone, in both modes."""
    evaluated = find_mixing(trial, training=False)
    if not evaluated.has_axis:
        text = "an output pairs the samples" if evaluated.pairs else "no output has an axis of the samples"
        return LayerProperty(outcome="cannot tell", text=text)
    if not evaluated.is_tested:
        return LayerProperty(outcome="cannot tell", text="no output changes with the input")
    if evaluated.leaks and not _is_batch_norm(evaluated.mixes):
        return _mixing_property(evaluated)
    trained = find_mixing(trial, training=True)
    if not trained.leaks:
        return LayerProperty(outcome="holds", text="each output depends on its own sample alone")
    if _is_batch_norm(trained.mixes):
        assert trained.mixes is not None, "it is a batch normalization"
        when = "in both modes" if evaluated.leaks else "in training"
        text = (
            f"`{trained.mixes.module or trained.mixes.described}` takes statistics over the batch {when}, as it should"
        )
        return LayerProperty(outcome="holds", text=text, module=trained.mixes.module)
    at = trained.scatters or trained.mixes
    if at is None:
        return LayerProperty(outcome="cannot tell", text="samples affect each other in training")
    text = f"{at.described} makes samples affect each other in training only: right for a batch normalization alone"
    return LayerProperty(outcome="cannot tell", text=text, **at.at)


def unpaired_samples(trial: LayerTrial) -> LayerProperty:
    """Judge whether broadcasting pairs no sample with the others, as (B, 1) with (B,) does."""
    module = trial.fresh(training=False)
    modules = ModuleStack(module)
    watch = BroadcastWatch(trial.prime, modules)
    trial.reset_random()
    with modules, eager(), watch:
        run_layer(module, trial.batch(trial.prime))
    if not watch.found:
        return LayerProperty(outcome="holds", text="no sample is broadcast against the others")
    first = watch.found[0]
    return LayerProperty(
        outcome="fails",
        text=first.text,
        module=first.module,
        place=first.place,
    )


def find_mixing(trial: LayerTrial, *, training: bool) -> Mixing:
    """Change one sample after another, and follow which values change with it."""
    n = trial.prime

    def passed(inputs: tuple[object, ...], dtype: torch.dtype | None) -> Pass:
        module = trial.fresh(training=training)
        return trial.run(module.to(dtype) if dtype is not None else module, inputs, keep=True)

    dtype: torch.dtype | None = torch.float64
    batch = trial.batch(n, dtype=dtype)
    try:
        base = passed(batch, dtype)
    except (RuntimeError, TypeError, NotImplementedError):  # a layer for one format; `dtype` says so
        batch, dtype = trial.batch(n), None
        base = passed(batch, dtype)
    changed = [passed(trial.with_changed_sample(batch, i), dtype) for i in range(min(CHANGED, n))]
    two = passed(trial.batch(2, dtype=dtype), dtype)  # shows which axes are those of the samples
    found = Mixing()
    for i, out in enumerate(base.outputs):
        axes = [a for a, (size, less) in enumerate(zip(out.shape, two.outputs[i].shape, strict=False)) if size != less]
        found.pairs |= len(axes) > 1
        if len(axes) != 1 or out.shape[axes[0]] != n or not out.is_floating_point():
            continue
        axis, found.has_axis = axes[0], True
        for sample, other in enumerate(changed):
            if other.outputs[i].shape != out.shape:
                continue
            mask = _changed(out, other.outputs[i]).movedim(axis, 0).reshape(n, -1).any(1)
            found.is_tested |= bool(mask.any())
            mask[sample] = False
            found.leaks |= bool(mask.any())
    if found.leaks:
        _follow(found, base.operations, [p.operations for p in changed], samples=n)
    return found


def _follow(
    found: Mixing, base: Sequence[RecordedOp], changed: Sequence[Sequence[RecordedOp]], *, samples: int
) -> None:
    """Find the first operation that mixes samples, and the ones before it that scatter or move them."""
    reaches = [_Reach(operation) for operation in base]
    for operations in changed:
        for reach, (one, other) in zip(reaches, alike(base, operations), strict=False):
            if one.results is None or other.results is None or one.shapes != other.shapes:
                break
            reach.masks.append(tuple(map(_changed, one.results, other.results)))
    for reach in reaches:
        if len(reach.masks) < len(changed) or "empty" in reach.operation.name:  # its memory is not initialized
            continue
        if reach.mixes:
            found.mixes = reach.operation
            return
        if found.scatters is None and reach.scatters:
            found.scatters = reach.operation
        elif found.moves is None and reach.moves(samples):
            found.moves = reach.operation


def _changed(a: Tensor, b: Tensor) -> Tensor:
    """Return which values differ by more than rounding."""
    if not (a.is_floating_point() or a.is_complex()):
        return a != b
    scale = torch.maximum(a.abs(), b.abs())
    limit = TOLERANCE if a.dtype == torch.float64 else 64 * torch.finfo(a.dtype).eps
    return ((a - b).abs() > limit * scale) | (torch.isfinite(a) != torch.isfinite(b))


def _is_apart(masks: Sequence[Tensor]) -> bool:
    """Return whether there is an axis along which the values that change with each sample do not overlap."""
    if masks[0].dim() == 0 or sum(bool(m.any()) for m in masks) < 2:
        return True
    for axis in range(masks[0].dim()):
        along = [m.movedim(axis, 0).reshape(m.shape[axis], -1).any(1) for m in masks]
        if int(torch.stack(along).sum(0).max()) < 2:
            return True
    return False


def _is_moved(masks: Sequence[Tensor], samples: int) -> bool:
    for axis, size in enumerate(masks[0].shape):
        along = [m.movedim(axis, 0).reshape(size, -1).any(1) for m in masks]
        if size == samples and int(torch.stack(along).sum(0).max()) < 2:
            return any(bool(row.any()) and not bool(row[i]) for i, row in enumerate(along))
    return False


def _is_batch_norm(operation: RecordedOp | None) -> bool:
    return (
        operation is not None and operation.module_class is not None and issubclass(operation.module_class, _BatchNorm)
    )


def _mixing_property(found: Mixing) -> LayerProperty:
    """Describe samples that affect each other in evaluation."""
    at = found.scatters or found.mixes or found.moves
    if at is None:
        text = "an output changes with another sample; the operation was not found"
        return LayerProperty(outcome="fails", text=text)
    if found.scatters is not None:
        text = f"{at.described} spreads each sample over all axes, as a reshape instead of a transpose does"
        if found.mixes is not None and found.mixes.place != at.place:
            text += f"; {found.mixes.described} then mixes them"
    elif found.mixes is not None:
        text = f"{at.described} mixes the samples of the batch"
        if _is_sequence(at):
            text += f"; {ADVICE}"
    else:
        text = f"{at.described} puts a sample where another one belongs"
    return LayerProperty(outcome="fails", text=text, **at.at)


def _is_sequence(operation: RecordedOp) -> bool:
    """Return whether an operation runs in a layer of torch that may take its samples along axis 1."""
    kind = operation.module_class
    names = {"RNN", "LSTM", "GRU", "MultiheadAttention"}
    return kind is not None and any(base.__name__ in names for base in kind.__mro__)
