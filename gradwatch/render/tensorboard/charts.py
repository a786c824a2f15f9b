"""Define and compute TensorBoard's charts: tag, meaning and values of each.

TensorBoard sorts groups by name and opens the first 2. The names are chosen so that these are `gradients` and `loss`.
Values that are not finite are left out of a chart, so that its axis stays useful. The group `nonfinite` counts them.
"""

# T = recorded steps, L = parameter tensors, M = layers, A = activation modules

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from gradwatch.history.store import History
from gradwatch.records import Severity
from gradwatch.render.common.format import GIB
from gradwatch.render.common.layers import Layer, newest_known, norms_now, update_ratios

Floats = NDArray[np.floating[Any]]

PICTURE, UPDATE_PICTURE = "gradients/by_layer_and_step", "updates/by_layer_and_step"
LOSS, VAL_LOSS, VAL_ACCURACY = "loss/train", "loss/validation", "validation/accuracy"
NONFINITE, NONFINITE_SO_FAR = "nonfinite/steps", "nonfinite/steps_so_far"
FINDINGS = "run/findings_so_far"
METRICS = {
    VAL_LOSS: "val_loss",
    VAL_ACCURACY: "val_accuracy",
    LOSS: "loss",
    NONFINITE_SO_FAR: "NaN or Inf steps",
    FINDINGS: "findings",
}
MARKERS = {"loss": "loss/nan_or_inf", "grad_norm.before_clip": "gradients/total_norm_nan_or_inf"}
"""Tags of the charts that mark non-finite values of a statistic. The statistic's own chart leaves them out."""
THIRDS = ("early", "middle", "late")
HEALTHY = (-4.0, -2.0)
"""Limits of the update/weight ratio of a healthy layer, as powers of ten: 10x below and above 1e-3, the rule of thumb
by A. Karpathy (Stanford CS231n notes, Neural Networks 3, "Ratio of weights:updates")."""


@final
@dataclass(frozen=True, slots=True)
class Chart:
    """One scalar chart of the run.

    Args:
        statistic: Name of a run statistic in the catalogue.
        tag: Group and name in TensorBoard.
        meaning: Description in one sentence.
        mean: Whether to show the mean since the last point instead of the newest value.
        scale: Factor from the catalogue's unit to the chart's unit.
    """

    statistic: str
    tag: str
    meaning: str
    mean: bool = False
    scale: float = 1.0


CHARTS = (
    Chart("loss", LOSS, "Training loss of the optimizer step."),
    Chart("grad_norm.before_clip", "gradients/total_norm", "L2 norm over all gradients, unscaled, before clipping."),
    Chart("grad_norm.after_clip", "gradients/total_norm_after_clip", "L2 norm over all gradients after clipping."),
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
ACT_CHARTS = {"act.dead_frac": "per_layer_dead_units_frac", "act.saturated_frac": "per_layer_saturated_frac"}
HISTOGRAMS = {"grad": "per_layer_log10_gradient", "weight": "per_layer_log10_weight"}

DESCRIPTIONS = {chart.tag: chart.meaning for chart in (*CHARTS, *SCALING, *VALIDATION)} | {
    **{f"gradients/log10_norm_{third}": f"Median gradient norm of the {third} third of the layers, as a power of ten. "
       "If early is far below late, gradients vanish." for third in THIRDS},
    "updates/log10_ratio_median": "Update norm divided by weight norm, median layer, as a power of ten.",
    "updates/log10_ratio_slowest": "The same for the slowest 10 % of the layers.",
    "updates/log10_ratio_fastest": "The same for the fastest 10 % of the layers.",
    "updates/healthy_from": "Rule of thumb: healthy layers learn between 1e-4 and 1e-2 of their size per step.",
    "updates/healthy_to": "Rule of thumb: healthy layers learn between 1e-4 and 1e-2 of their size per step.",
    "nonfinite/layers": "Most layers at once with NaN or Inf in their gradient since the last point. "
    "Such values are left out of all other charts.",
    NONFINITE: "Steps with a NaN or Inf loss or gradient norm since the last point.",
    NONFINITE_SO_FAR: "Steps with a NaN or Inf loss or gradient norm since the run began.",
    FINDINGS: "Warnings and critical problems so far; see the TEXT tab for details.",
    **dict.fromkeys(MARKERS.values(), "Plotted where the value was NaN or Inf, at the last finite value."),
    "sparsity": "The layer with the largest fraction.",
    "optim": "Learning rate of the optimizer's group.",
    "per_layer_grad_norm": "L2 norm of the parameter's gradient, unscaled, before clipping.",
    "per_layer_update_ratio": "L2 norm of the update / L2 norm of the weight.",
    "per_layer_zero_frac": "Fraction of the gradient that is exactly zero; charted from the first zero on.",
    "per_layer_dead_units_frac": "Fraction of dead units: zero for every sample of the batch.",
    "per_layer_saturated_frac": "Fraction of saturated outputs: in the flat tail of the activation function.",
}  # fmt: skip


def rows_since(history: History, step: int) -> int:
    """Return the number of recorded steps after a step, at least 1 and at most the window."""
    return max(1, int(np.count_nonzero(history.run.steps() > step)))


def run_points(history: History, of: Sequence[Layer], rows: int) -> dict[str, float]:
    """Return the finite values of all charts of the run, by tag.

    Args:
        history: The run so far.
        of: Layers through which gradients flow, input side first.
        rows: Number of recorded steps since the last point.
    """
    points = {}
    for chart in (*CHARTS, *(SCALING if history.info.loss_scaling else ())):
        values = history.scalar(chart.statistic, rows if chart.mean else 1).tolist()
        known = [value for value in values if math.isfinite(value)] if chart.mean else values
        # a newest value that is not finite stays, and `_finite` drops it below
        points[chart.tag] = chart.scale * sum(known) / len(known) if known else math.nan
    # nothing was clipped: a second curve would only cover the first
    if points["gradients/total_norm_after_clip"] == points["gradients/total_norm"]:
        del points["gradients/total_norm_after_clip"]
    for i in range(history.groups):
        # a single group needs no number
        tag = "optim/learning_rate" + (f"_group_{i}" if history.groups > 1 else "")
        points[tag] = float(history.scalar(f"lr.{i}", 1)[-1])
    points[FINDINGS] = float(sum(f.severity > Severity.INFO for f in history.findings))
    points |= _flow(history, of) | _updates(history, of) | _sparsity(history) | _nonfinite(history, rows)
    return _finite(points)


def validation_points(history: History, after: int) -> list[tuple[int, dict[str, float]]]:
    """Return the validations after a step, each with its step and its values by tag."""
    # without a new validation, skip reading whole columns of the history
    if all(history.latest_validation(chart.statistic)[0] <= after for chart in VALIDATION):
        return []
    steps_T = history.steps(VALIDATION[0].statistic)
    values = {chart.tag: history[chart.statistic] for chart in VALIDATION}
    points = []
    for i in np.flatnonzero(steps_T > after).tolist():
        known = _finite({tag: float(values_T[i]) for tag, values_T in values.items()})
        if known:
            points.append((int(steps_T[i]), known))
    return points


def layer_points(history: History, seen: set[str]) -> dict[str, float]:
    """Return the finite values of all charts of layers, by tag.

    Args:
        history: The run so far.
        seen: Tags of zero fractions that were above 0 before. New tags are added to the set.
    """
    points = {}
    for statistic, group in PARAM_CHARTS.items():
        sampled = statistic == "update.ratio"  # the newest step may not have it
        values_L = newest_known(history.param, statistic) if sampled else history.param.newest(statistic)
        for name, value in zip(history.param.layers, values_L.tolist(), strict=True):
            tag = f"{group}/{name}"
            if statistic == "grad.zero_frac" and value > 0:
                seen.add(tag)
            # charted from the first zero on: a chart that is always 0 shows nothing
            if statistic != "grad.zero_frac" or tag in seen:
                points[tag] = value
    for statistic, group in ACT_CHARTS.items():
        for name, value in zip(history.act.layers, newest_known(history.act, statistic).tolist(), strict=True):
            points[f"{group}/{name}"] = value
    return _finite(points)


def nonfinite_steps(history: History, *, until: int) -> int:
    """Return the number of kept steps, up to `until`, at which loss or gradient norm was not finite."""
    broken_T = ~np.isfinite(history["loss"]) | ~np.isfinite(history["grad_norm.before_clip"])
    return int((broken_T & (history.steps("loss") <= until)).sum())


def _flow(history: History, of: Sequence[Layer]) -> dict[str, float]:
    """Return the median gradient norm of each third of the layers, as a power of ten."""
    if len(of) < len(THIRDS):
        return {}
    norms, points = norms_now(history, of).tolist(), {}
    for i, third in enumerate(THIRDS):
        part = norms[i * len(norms) // len(THIRDS) : (i + 1) * len(norms) // len(THIRDS)]
        logs = [math.log10(norm) for norm in part if 0 < norm < math.inf]
        points[f"gradients/log10_norm_{third}"] = statistics.median(logs) if logs else math.nan
    return points


def _updates(history: History, of: Sequence[Layer]) -> dict[str, float]:
    ratios_M = update_ratios(history, of)
    usable_M = ratios_M[np.isfinite(ratios_M) & (ratios_M > 0)]
    if not usable_M.size:
        return {}
    # quantiles rather than extremes: a single odd layer does not move the band
    slow, middle, fast = np.quantile(np.log10(usable_M), (0.1, 0.5, 0.9)).tolist()
    ratios = {"updates/log10_ratio_slowest": slow, "updates/log10_ratio_median": middle}
    band = {"updates/healthy_from": HEALTHY[0], "updates/healthy_to": HEALTHY[1]}
    return ratios | {"updates/log10_ratio_fastest": fast} | band


def _sparsity(history: History) -> dict[str, float]:
    points = {"sparsity/zero_gradient_frac": _most(history.param.newest("grad.zero_frac"))}
    if history.act.last_step >= 0:  # else no activation was sampled yet
        points["sparsity/dead_units_frac"] = _most(history.act.newest("act.dead_frac"))
        points["sparsity/saturated_frac"] = _most(history.act.newest("act.saturated_frac"))
    return points


def _most(values_L: Floats) -> float:
    # nan if all are nan or there are none: fmax ignores nan, and `_finite` drops it
    return float(np.fmax.reduce(values_L, initial=np.nan))


def _nonfinite(history: History, rows: int) -> dict[str, float]:
    """Return the number of layers and steps that were not finite since the last point.

    Each statistic that was not finite also gets a marker at its last finite value, or at 0.
    """
    points = {}
    layers_T = np.count_nonzero(history.param.window("grad.nonfinite", rows) > 0, axis=1)
    broken_T = layers_T > 0
    for statistic, tag in MARKERS.items():
        finite_T = np.isfinite(history.scalar(statistic, rows))
        if not finite_T.all():
            broken_T |= ~finite_T
            # over the whole window: the last finite value may be older than the last point
            values_T = history.scalar(statistic)
            points[tag] = next((value for value in values_T[::-1].tolist() if math.isfinite(value)), 0.0)
    return points | {"nonfinite/layers": float(layers_T.max(initial=0)), NONFINITE: float(broken_T.sum())}


def _finite(points: dict[str, float]) -> dict[str, float]:
    return {tag: value for tag, value in points.items() if math.isfinite(value)}
