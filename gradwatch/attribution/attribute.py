"""Offer `gradwatch.attribute`: the map of one sample with its evidence and a verdict."""

# B = samples of a batch

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import torch
from torch import Tensor, nn

from gradwatch.attribution.baselines import baselines
from gradwatch.attribution.evidence import measure
from gradwatch.attribution.judge import judge
from gradwatch.attribution.methods import Mapper, Method
from gradwatch.attribution.result import Attribution
from gradwatch.attribution.score import Score, Target, evaluating
from gradwatch.attribution.thresholds import Thresholds
from gradwatch.errors import GradwatchError, did_you_mean


def attribute(
    model: nn.Module,
    inputs: Tensor,
    target: Target = None,
    *,
    method: Method = "integrated",
    data: Tensor | None = None,
    baseline: Tensor | None = None,
    layer: nn.Module | None = None,
    names: Sequence[str] | None = None,
    thresholds: Thresholds | None = None,
    seed: int = 0,
) -> Attribution:
    """Explain one output of a model for one sample, and judge whether the explanation holds.

    The model runs in evaluation mode. Its modes and the random generators are restored.

    Args:
        model: Returns one tensor of scores, such as logits.
        inputs: One sample with its batch dimension: numbers (1, ...), an image (1, C, H, W), or tokens (1, T) for the
            embedding of the model.
        target: Index of the output: a class, or a tuple such as (position, token); None for a model with one output.
        method: `integrated`, `saliency`, `smoothgrad`, `occlusion` or `gradcam`.
        data: Other samples, (B, ...), whose mean is the baseline; without them the baseline is zero.
        baseline: Baseline to measure from, of the shape of the inputs, instead.
        layer: Convolution of `gradcam`; by default the last.
        names: Names of the values, or texts of the tokens, to show instead of their numbers.
        thresholds: Tolerances and thresholds of the verdict.
        seed: Seed of the noise and of the random orders.

    Returns:
        The map with its evidence and the verdict: `holds`, `misleads` or `cannot tell`. Its text is a small table.

    Raises:
        GradwatchError: An argument is wrong, or Captum is not installed.
    """
    _check_arguments(model, inputs, method, data, baseline)
    limits = thresholds or Thresholds()
    with evaluating(model, seed=seed):
        score = Score(model, inputs, target)
        mapper = Mapper(score, method, limits=limits, layer=layer)
        bases = baselines(score, data)
        if baseline is not None:
            bases = {"given": baseline.to(score.point), **bases}
        found = mapper(score.point, next(iter(bases.values())))
        evidence = measure(score, mapper, found, bases, limits)
        verdict, reasons = judge(evidence, method, limits)
    totals = tuple(score.totals(found.values).tolist())
    if names is not None and len(names) != len(totals):
        raise GradwatchError(f"names: got {len(names)}, expected {len(totals)}: one for each value, pixel or token")
    return Attribution(
        method=method,
        target=target,
        kind=score.kind,
        is_signed=mapper.is_signed,
        verdict=verdict,
        reasons=reasons,
        evidence=evidence,
        evaluations=found.evaluations,
        standard_error=found.standard_error,
        values=found.values.detach(),
        contributions=None if found.contributions is None else found.contributions.detach(),
        totals=totals,
        inputs=inputs.detach(),
        names=tuple(names or ()),
    )


def _check_arguments(model: Any, inputs: Any, method: Any, data: Any, baseline: Any) -> None:
    if not isinstance(model, nn.Module):
        raise GradwatchError(f"model: got a {type(model).__name__}, expected a torch.nn.Module")
    if not isinstance(inputs, Tensor):
        raise GradwatchError(f"inputs: got a {type(inputs).__name__}, expected a tensor with a batch dimension of 1")
    if inputs.ndim < 2 or len(inputs) != 1 or not inputs.numel():
        raise GradwatchError(
            f"inputs: got shape {tuple(inputs.shape)}, expected one sample with its batch dimension, (1, ...); "
            "inputs[3:4] is sample 3 of a batch"
        )
    if method not in get_args(Method):
        known = get_args(Method)
        raise GradwatchError(
            f"method: got {method!r}, expected one of {', '.join(known)}{did_you_mean(str(method), known)}"
        )
    if data is not None and not (isinstance(data, Tensor) and data.shape[1:] == inputs.shape[1:] and len(data)):
        shape = tuple(data.shape) if isinstance(data, Tensor) else type(data).__name__
        raise GradwatchError(f"data: got {shape}, expected samples of shape (B, {_dimensions(inputs)})")
    if baseline is not None and not (
        isinstance(baseline, Tensor) and baseline.shape == inputs.shape and torch.is_floating_point(inputs)
    ):
        raise GradwatchError(
            f"baseline: expected a tensor of shape (1, {_dimensions(inputs)}), for floating point inputs"
        )


def _dimensions(inputs: Tensor) -> str:
    return ", ".join(map(str, inputs.shape[1:]))
