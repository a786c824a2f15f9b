"""Define and compute TensorBoard's charts: tag, meaning and values of each.

TensorBoard sorts groups and charts by name and opens the first 2 groups. These are `curves`, with loss, validation
loss, learning rate and total norm in this order, and `gradients`, with the picture of all layers.

A NaN or Inf of the loss and of the total norms is written as NaN, which TensorBoard marks with a triangle at the height
of the last finite value. All other charts leave such values out, so that their axes stay useful.
"""

# T = recorded steps, P = points of a chart, L = parameter tensors, M = layers, K = kinds of findings

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from gradwatch.history.store import VALIDATION as VALIDATED
from gradwatch.history.store import History
from gradwatch.records import Finding, Severity
from gradwatch.render.common.format import GIB
from gradwatch.render.common.layers import Layer, grad_norms, ratios
from gradwatch.render.tensorboard.excerpt import HistoryExcerpt, TableExcerpt

Floats = NDArray[np.floating[Any]]
Steps = NDArray[np.int64]

PICTURE, UPDATE_PICTURE = "gradients/by_layer_and_step", "updates/by_layer_and_step"
LOSS, VAL_LOSS, VAL_ACCURACY = "curves/loss", "curves/loss_validation", "curves/validation_accuracy"
NORM, CLIPPED_NORM = "curves/total_norm", "curves/total_norm_after_clip"
RATE = "curves/lr"
NONFINITE = "nonfinite/steps"
PRESENT = "problems/present"
METRICS = {
    VAL_LOSS: "val_loss",
    VAL_ACCURACY: "val_accuracy",
    LOSS: "loss",
    NONFINITE: "NaN or Inf steps",
    PRESENT: "problems",
}
SHOWN_AS_NAN = frozenset((LOSS, NORM, CLIPPED_NORM))
"""Tags of the charts whose values that are not finite are points too."""
MEASURED = ("loss", "grad_norm.before_clip")
"""Statistics of every step; a step counts as a step with NaN or Inf if one of them is not finite."""
THIRDS = ("early", "middle", "late")
HEALTHY = (-4.0, -2.0)
"""Limits of the update/weight ratio of a healthy layer, as powers of ten: 10x below and above 1e-3, the rule of thumb
by A. Karpathy (Stanford CS231n notes, Neural Networks 3, "Ratio of weights:updates")."""


class Block(NamedTuple):
    """Points of several charts at the same steps.

    Args:
        steps_P: Steps of the points, increasing.
        values: Values of shape (P,) by tag. A nan adds no point, except in the charts `SHOWN_AS_NAN`.
    """

    steps_P: Steps
    values: dict[str, Floats]


@final
@dataclass(frozen=True, slots=True)
class Chart:
    """One scalar chart of the run.

    Args:
        statistic: Name of a run statistic in the catalogue.
        tag: Group and name in TensorBoard.
        meaning: Description in one sentence.
        mean: Whether to show the mean since the last point instead of the value at the point.
        scale: Factor from the catalogue's unit to the chart's unit.
    """

    statistic: str
    tag: str
    meaning: str
    mean: bool = False
    scale: float = 1.0


BROKEN = "A triangle marks NaN or Inf, at the height of the last finite value."
CHARTS = (
    Chart("loss", LOSS, f"Training loss of the optimizer step. {BROKEN}"),
    Chart("grad_norm.before_clip", NORM, f"L2 norm over all gradients, unscaled, before clipping. {BROKEN}"),
    Chart("grad_norm.after_clip", CLIPPED_NORM, f"L2 norm over all gradients after clipping. {BROKEN}"),
    Chart("step_ms", "speed/step_ms", "Wall time of one optimizer step, mean since the last point.", mean=True),
    Chart("data_wait_ms", "speed/data_wait_ms", "Mean time a step waited for its batches.", mean=True),
    Chart("samples_per_s", "speed/samples_per_s", "Samples per second, mean since the last point.", mean=True),
    Chart(
        "peak_memory_bytes", "speed/peak_memory_GiB", "Peak memory: CUDA's allocator, else the process.", False, 1 / GIB
    ),
    Chart("watch_ms", "speed/watch_ms", "Mean overhead of monitoring per step since the last point.", mean=True),
)
SCALING = (
    Chart("loss_scale", "optim/loss_scale", "Scale of the GradScaler."),
    Chart("skipped", "optim/skipped_frac", "Fraction of updates skipped since the last point.", mean=True),
)
VALIDATION = (
    Chart("val_loss", VAL_LOSS, "Validation loss."),
    Chart("val_accuracy", VAL_ACCURACY, "Fraction of validation targets predicted correctly."),
)

PARAM_CHARTS = {
    "grad.l2": "per_layer_grad_norm",
    "update.ratio": "per_layer_update_ratio",
    "grad.zero_frac": "per_layer_zero_frac",
}
ACT_CHARTS = {
    "act.dead_frac": "per_layer_dead_units_frac",
    "act.saturated_frac": "per_layer_saturated_frac",
    "attention.max_logit": "per_layer_attention_logit",
    "attention.entropy": "per_layer_attention_entropy",
}
HISTOGRAMS = {"grad": "per_layer_log10_gradient", "weight": "per_layer_log10_weight"}

DESCRIPTIONS = {chart.tag: chart.meaning for chart in (*CHARTS, *SCALING, *VALIDATION)} | {
    "curves": "Learning rate of the optimizer's group.",
    **{f"gradients/log10_norm_{third}": f"Median gradient norm of the {third} third of the layers, as a power of ten. "
       "If early is far below late, gradients vanish." for third in THIRDS},
    "updates/log10_ratio_median": "Update norm divided by weight norm, median layer, as a power of ten.",
    "updates/log10_ratio_slowest": "Update norm divided by weight norm; 10 % of the layers are slower.",
    "updates/log10_ratio_fastest": "Update norm divided by weight norm; 10 % of the layers are faster.",
    "updates/healthy_from": "Rule of thumb: healthy layers learn between 1e-4 and 1e-2 of their size per step.",
    "updates/healthy_to": "Rule of thumb: healthy layers learn between 1e-4 and 1e-2 of their size per step.",
    "nonfinite/layers": "Largest number of layers with NaN or Inf in their gradient since the last point.",
    NONFINITE: "Steps with a NaN or Inf loss or gradient norm since the run began.",
    PRESENT: "Warnings and critical problems at each step, from their onset on; see the TEXT tab for details.",
    "problems": "Onset of the problem, drawn at the height of the loss.",
    "sparsity": "Fraction in the layer where it is largest.",
    "per_layer_grad_norm": "L2 norm of the parameter's gradient, unscaled, before clipping.",
    "per_layer_update_ratio": "L2 norm of the update / L2 norm of the weight.",
    "per_layer_zero_frac": "Fraction of the gradient that is exactly zero; charted from the first zero on.",
    "per_layer_dead_units_frac": "Fraction of dead units: zero for every sample of the batch.",
    "per_layer_saturated_frac": "Fraction of saturated outputs: in the flat tail of the activation function.",
    "per_layer_attention_logit": "Largest attention logit, before the softmax.",
    "per_layer_attention_entropy": "Smallest entropy of an attention head; 1 is an even spread.",
}  # fmt: skip


def run_blocks(history: History, of: Sequence[Layer], points: HistoryExcerpt, *, nonfinite: int = 0) -> list[Block]:
    """Return the charts of the run.

    Args:
        history: The run so far.
        of: Layers through which gradients flow, input side first.
        points: Steps to show.
        nonfinite: Number of steps with NaN or Inf before the steps of `points`.
    """
    run, values = points.run, {}
    for chart in (*CHARTS, *(SCALING if history.info.loss_scaling else ())):
        known_P1 = run.mean(chart.statistic) if chart.mean else run.at(chart.statistic)
        values[chart.tag] = known_P1[:, 0] * chart.scale
    # nothing was clipped: a second curve would only cover the first
    if np.array_equal(values[CLIPPED_NORM], values[NORM], equal_nan=True):
        del values[CLIPPED_NORM]
    for i in range(history.groups):
        # a single group needs no number
        values[RATE + (f"_group_{i}" if history.groups > 1 else "")] = run.at(f"lr.{i}")[:, 0]
    values[PRESENT] = _present((*history.findings, *history.withdrawn), run.steps_P)
    values[NONFINITE] = nonfinite + np.cumsum(run.nonfinite_steps(*MEASURED), dtype=np.float64)
    values["nonfinite/layers"] = points.param.count("grad.nonfinite", lambda bad_TL: bad_TL > 0).astype(np.float64)
    values["sparsity/zero_gradient_frac"] = _most(points.param.at("grad.zero_frac"))
    values |= _flow(points.param, of) | _updates(points.param, of)
    blocks = [Block(run.steps_P, values)]
    if len(points.act):  # else no activation was sampled
        frac = {name: _most(points.act.last_known(f"act.{name}")) for name in ("dead_frac", "saturated_frac")}
        tags = {"sparsity/dead_units_frac": frac["dead_frac"], "sparsity/saturated_frac": frac["saturated_frac"]}
        blocks.append(Block(points.act.steps_P, tags))
    return blocks


def layer_blocks(points: HistoryExcerpt, seen: set[str]) -> list[Block]:
    """Return the charts of layers.

    Args:
        points: Steps to show.
        seen: Tags of zero fractions that were above 0 before. New tags are added to the set.
    """
    values: dict[str, Floats] = {}
    for statistic, group in PARAM_CHARTS.items():
        # updates are sampled, so the step of a point may not have them
        known_PL = points.param.last_known(statistic) if statistic == "update.ratio" else points.param.at(statistic)
        charted = {f"{group}/{name}": known_PL[:, i] for i, name in enumerate(points.param.layers)}
        if statistic == "grad.zero_frac":  # charted from the first zero on: a chart that is always 0 shows nothing
            seen |= {tag for tag, zeros_P in charted.items() if (zeros_P > 0).any()}
            charted = {tag: zeros_P for tag, zeros_P in charted.items() if tag in seen}
        values |= charted
    blocks = [Block(points.param.steps_P, values)]
    if len(points.act):
        acts: dict[str, Floats] = {}
        for statistic, group in ACT_CHARTS.items():
            known_PL = points.act.last_known(statistic)
            acts |= {f"{group}/{name}": known_PL[:, i] for i, name in enumerate(points.act.layers)}
        blocks.append(Block(points.act.steps_P, acts))
    return blocks


def validation_block(history: History, *, after: int, most: int | None = None) -> Block | None:
    """Return the validations after a step, or None if there is none.

    Args:
        history: The run so far.
        after: Step of the newest validation that is already shown.
        most: Maximum number of validations, or None for all.
    """
    # without a new validation, skip reading whole columns of the history
    if all(history.latest_validation(statistic)[0] <= after for statistic in VALIDATED):
        return None
    steps_T = history.steps(VALIDATION[0].statistic)
    values = {chart.tag: history[chart.statistic] for chart in VALIDATION}
    places = np.flatnonzero((steps_T > after) & ~np.isnan(np.array(list(values.values()))).all(axis=0))
    if most and len(places) > most:
        places = places[np.linspace(0, len(places) - 1, most).round().astype(np.intp)]
    return Block(steps_T[places], {tag: values_T[places] for tag, values_T in values.items()})


def problem_marks(history: History) -> dict[str, Block]:
    """Return one point for each kind of problem, by tag: its first onset, at the height of the loss."""
    steps_T, losses_T = history.steps("loss"), history["loss"]
    is_finite_T = np.isfinite(losses_T)
    steps_T, losses_T = steps_T[is_finite_T], losses_T[is_finite_T]
    marks = {}
    for kind, finding in problems(history).items():
        tag = f"problems/{kind}"
        # the newest finite loss up to the onset, else the first one, else 0
        place = max(int(np.searchsorted(steps_T, finding.since, side="right")) - 1, 0)
        height = losses_T[place : place + 1] if len(losses_T) else np.zeros(1)
        marks[tag] = Block(np.array([finding.since]), {tag: height})
    return marks


def problems(history: History) -> dict[str, Finding]:
    """Return the earliest finding above info of each kind, withdrawn ones too, by kind."""
    serious = [f for f in (*history.findings, *history.withdrawn) if f.severity > Severity.INFO]
    # the last one of a kind stays
    return {f.kind: f for f in sorted(serious, key=lambda f: (f.since, -f.severity), reverse=True)}


def num_layer_charts(history: History) -> int:
    """Return the maximum number of charts of layers."""
    # attention has two charts, and so has every other activation
    return len(PARAM_CHARTS) * len(history.param.layers) + len(ACT_CHARTS) // 2 * len(history.act.layers)


def points_of(block: Block) -> list[tuple[int, dict[str, float]]]:
    """Return each step of a block with the values that are drawn, by tag."""
    tags = list(block.values)
    is_marked_C = np.array([tag in SHOWN_AS_NAN for tag in tags], np.bool_)
    if not tags:  # no layers were monitored
        return [(step, {}) for step in block.steps_P.tolist()]
    table_PC = np.stack([block.values[tag] for tag in tags], axis=1).astype(np.float64)
    finite_PC = np.isfinite(table_PC)
    table_PC[~finite_PC] = np.nan
    points = []
    for step, values, shown in zip(
        block.steps_P.tolist(), table_PC.tolist(), (finite_PC | is_marked_C).tolist(), strict=True
    ):
        points.append((step, {tag: value for tag, value, use in zip(tags, values, shown, strict=True) if use}))
    return points


def nonfinite_steps(history: History, *, until: int) -> int:
    """Return the number of kept steps, up to `until`, at which loss or gradient norm was not finite."""
    broken_T = ~np.logical_and.reduce([np.isfinite(history[name]) for name in MEASURED])
    return int((broken_T & (history.steps("loss") <= until)).sum())


def _present(findings: Sequence[Finding], steps_P: Steps) -> Floats:
    """Return the number of findings above info that were present at each step, of shape (P,)."""
    serious = [f for f in findings if f.severity > Severity.INFO]
    begun_K = np.array([f.since for f in serious], np.int64)
    ended_K = np.array([math.inf if f.ended is None else f.ended for f in serious])
    present_PK = (begun_K <= steps_P[:, None]) & (steps_P[:, None] < ended_K)
    present_P: Floats = np.count_nonzero(present_PK, axis=1).astype(np.float64)
    return present_P


def _flow(param: TableExcerpt, of: Sequence[Layer]) -> dict[str, Floats]:
    """Return the median gradient norm of each third of the layers, as a power of ten."""
    if len(of) < len(THIRDS):
        return {}
    logs_PM = _logs(grad_norms(param.at("grad.l2"), param.at("grad.nonfinite"), of))
    edges = [i * len(of) // len(THIRDS) for i in range(len(THIRDS) + 1)]
    parts = zip(THIRDS, edges, edges[1:], strict=False)
    return {f"gradients/log10_norm_{third}": _quantile(logs_PM[:, a:b], 0.5) for third, a, b in parts}


def _updates(param: TableExcerpt, of: Sequence[Layer]) -> dict[str, Floats]:
    logs_PM = _logs(ratios(param.last_known("update.ratio"), param.last_known("weight.l2"), of))
    if np.isnan(logs_PM).all():
        return {}
    # quantiles rather than extremes: a single odd layer does not move the band
    levels = {"slowest": 0.1, "median": 0.5, "fastest": 0.9}
    values = {f"updates/log10_ratio_{name}": _quantile(logs_PM, level) for name, level in levels.items()}
    known_P = ~np.isnan(values["updates/log10_ratio_median"])
    limits = zip(("updates/healthy_from", "updates/healthy_to"), HEALTHY, strict=True)
    return values | {tag: np.where(known_P, limit, np.nan) for tag, limit in limits}


def _logs(values_PM: Floats) -> Floats:
    """Return powers of ten; nan for all values that have none."""
    usable_PM = np.isfinite(values_PM) & (values_PM > 0)
    logs_PM: Floats = np.log10(np.where(usable_PM, values_PM, np.nan))
    return logs_PM


def _quantile(values_PM: Floats, level: float) -> Floats:
    """Return a quantile of the known values of each row, of shape (P,); nan if there is none."""
    # `np.nanquantile` takes 50 us a row
    sorted_PM = np.sort(values_PM, axis=1)  # nan is last
    place_P1 = level * np.maximum(np.count_nonzero(~np.isnan(sorted_PM), axis=1, keepdims=True) - 1, 0)
    below_P1 = np.floor(place_P1).astype(np.intp)
    low_P1 = np.take_along_axis(sorted_PM, below_P1, axis=1)
    high_P1 = np.take_along_axis(sorted_PM, np.ceil(place_P1).astype(np.intp), axis=1)
    quantile_P1: Floats = low_P1 + (place_P1 - below_P1) * (high_P1 - low_P1)
    return quantile_P1[:, 0]


def _most(values_PL: Floats) -> Floats:
    # nan if all are nan or there are none: fmax ignores nan
    most_P: Floats = np.fmax.reduce(values_PL, axis=1, initial=np.nan)
    return most_P
