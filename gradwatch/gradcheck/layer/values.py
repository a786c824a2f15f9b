"""Judge the shapes of a layer at several batch sizes, and its values and gradients at extreme inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from gradwatch.errors import raised
from gradwatch.gradcheck.layer.recorder import RecordedOp, alike, raised_at
from gradwatch.gradcheck.layer.result import LayerProperty, Outcome
from gradwatch.gradcheck.layer.trial import LayerTrial, Pass
from gradwatch.gradcheck.stepping.tensors import is_continuous, random_like
from gradwatch.replay.locate.records import Operation
from gradwatch.replay.locate.step_tracer import StepTracer

HUGE, TINY = 1e4, 1e-20
"""Largest magnitude of the huge input, whose square float16 cannot hold, and of the tiny one, with a square of 0."""


def shapes(trial: LayerTrial) -> LayerProperty:
    """Judge whether the outputs of batches of several sizes, 1 among them, differ in the axis of the samples alone."""
    sizes = sorted({1, 2, trial.size, trial.prime})
    passes: dict[int, Pass] = {}
    for n in sizes:
        try:
            passes[n] = trial.run(trial.fresh(training=False), trial.batch(n))
        except Exception as error:  # the user's code may raise anything
            if n == trial.size:
                raise
            text = f"a batch of {n} raises {raised(error).splitlines()[0]}"
            if trial.is_ambiguous:
                text += "; an axis has the size of the batch: give an input with other sizes"
            outcome: Outcome = "cannot tell" if trial.is_ambiguous else "fails"
            return LayerProperty(outcome=outcome, text=text, place=raised_at(error))
    a, b = trial.size, trial.prime if trial.prime != trial.size else 2
    axes = [_grown(x.shape, y.shape) for x, y in zip(passes[a].outputs, passes[b].outputs, strict=False)]
    for n in sizes:
        for i, (out, usual) in enumerate(zip(passes[n].outputs, passes[a].outputs, strict=False)):
            expected = list(usual.shape)
            for axis in axes[i]:
                if expected[axis] % a == 0:
                    expected[axis] = expected[axis] // a * n
            if list(out.shape) != expected:
                at = _shape_changer(passes[n].operations, passes[a].operations)
                text = f"a batch of {n} gives {tuple(out.shape)}, expected {tuple(expected)}"
                text += f": {at.described} drops an axis of size 1" if at else ""
                return LayerProperty(outcome="fails", text=text, **(at.at if at else {}))
    text = f"batches of {', '.join(map(str, sizes[:-1]))} and {sizes[-1]}"
    return LayerProperty(outcome="holds", text=text)


def extremes(trial: LayerTrial) -> LayerProperty:
    """Judge whether outputs and gradients are finite for the example, zeros, constants, huge and tiny values."""
    tried, wrong = [], []
    for name, batch in _extreme_batches(trial):
        module = trial.fresh(training=True)
        bad = _non_finite(trial, module, batch)
        tried.append(name)
        if bad:
            wrong.append((name, bad, batch))
    if not wrong:
        text = f"outputs and gradients are finite for {', '.join(tried)}"
        return LayerProperty(outcome="holds", text=text)
    _, bad, batch = wrong[0]
    names = " and ".join(name for name, _, _ in wrong)
    found = _origin(trial, batch)
    if found is None:
        return LayerProperty(outcome="fails", text=f"{names}: {bad} is not finite")
    where = f" in `{found.module}` ({found.module_type})" if found.module else ""
    kind = f"the gradient of `{found.node.removesuffix('0').removesuffix('Backward').lower()}`" if found.node else ""
    text = f"{names}: {bad} is not finite, from {kind or f'`{found.name}`'}{where}"
    return LayerProperty(outcome="fails", text=text, module=found.module, place=found.place)


def _grown(a: torch.Size, b: torch.Size) -> list[int]:
    return [i for i, (m, n) in enumerate(zip(a, b, strict=False)) if m != n]


def _shape_changer(operations: list[RecordedOp], usual: list[RecordedOp]) -> RecordedOp | None:
    """Return the first operation whose results have another number of axes than in the usual batch."""
    for one, other in alike(operations, usual):
        if [len(s) for s in one.shapes] != [len(s) for s in other.shapes]:
            return one
    return None


def _extreme_batches(trial: LayerTrial) -> Iterator[tuple[str, tuple[Any, ...]]]:
    example = trial.batch(trial.size)
    yield "the given input", example

    def mapped(change: Callable[[Tensor], Tensor]) -> tuple[Any, ...]:
        return tuple(tree_map_only(Tensor, lambda t: change(t) if is_continuous(t) else t, example))

    tensors = [t for t in tree_leaves(example) if isinstance(t, Tensor)]
    if any(is_continuous(t) for t in tensors):
        yield "zeros", mapped(torch.zeros_like)
        yield "a constant", mapped(torch.ones_like)
        yield f"huge values ({HUGE:g})", mapped(lambda t: t * (HUGE / max(_largest(t), 1e-30)))
        yield f"tiny values ({TINY:g})", mapped(lambda t: t * (TINY / max(_largest(t), 1e-30)))
    if any(not is_continuous(t) and t.dtype != torch.bool for t in tensors):
        zero = tree_map(lambda t: torch.zeros_like(t) if isinstance(t, Tensor) and not is_continuous(t) else t, example)
        yield "index 0", tuple(zero)


def _largest(tensor: Tensor) -> float:
    return float(tensor.detach().abs().nan_to_num(0.0, 0.0, 0.0).max()) if tensor.numel() else 0.0


def _leaves(batch: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the batch with floating-point tensors that require a gradient."""
    return tuple(tree_map_only(Tensor, lambda t: t.clone().requires_grad_() if is_continuous(t) else t, batch))


def _projected(outputs: Any) -> Tensor:
    """Return one number whose gradient reaches every output with fixed random factors."""
    generator = torch.Generator().manual_seed(1)
    parts = [t for t in tree_leaves(outputs) if isinstance(t, Tensor) and t.requires_grad]
    projected = [(random_like(t.detach(), generator).conj() * t).sum() for t in parts]
    total = torch.zeros(())
    for part in projected:
        total = total + (part.real if part.is_complex() else part)
    return total


def gradients_of(
    trial: LayerTrial, module: nn.Module, batch: tuple[Any, ...], *, record: bool = False
) -> tuple[Pass, list[Tensor]]:
    """Run forward and backward, and return the pass and the gradients of parameters and inputs."""
    inputs = tuple(tree_map_only(Tensor, lambda t: t * 1 if t.requires_grad else t, leaves := _leaves(batch)))
    done = trial.run(module, inputs, keep=record, record=record)
    total = _projected(done.outputs)
    if total.requires_grad:
        total.backward()
    holders = [*module.parameters(), *(t for t in tree_leaves(leaves) if isinstance(t, Tensor))]
    return done, [t.grad.to_dense() if t.grad.is_sparse else t.grad for t in holders if t.grad is not None]


def _non_finite(trial: LayerTrial, module: nn.Module, batch: tuple[Any, ...]) -> str:
    """Return the value that is not finite: an output or a gradient; or an empty string. A mask may be -inf."""
    done, gradients = gradients_of(trial, module, batch)
    floats = [t.detach() for t in done.outputs if is_continuous(t)]
    if any(bool((~torch.isfinite(t) & ~_is_negative_infinity(t)).any()) for t in floats):
        return "the output"
    return "a gradient" if any(not bool(torch.isfinite(g).all()) for g in gradients) else ""


def _is_negative_infinity(tensor: Tensor) -> Tensor:
    return torch.isneginf(tensor) if not tensor.is_complex() else torch.zeros_like(tensor, dtype=torch.bool)


def _origin(trial: LayerTrial, batch: tuple[Any, ...]) -> Operation | None:
    """Return the first operation with a result that is not finite."""
    module = trial.fresh(training=True)
    trial.reset_random()
    start = StepTracer(lambda *given: _projected(module(*given)), model=module).run(_leaves(batch)).start
    return None if start is None else start.operation
