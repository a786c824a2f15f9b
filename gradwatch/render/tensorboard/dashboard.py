"""Lay out the charts of a run on TensorBoard's custom-scalars dashboard: loss first, speed last."""

from __future__ import annotations

from collections.abc import Sequence

from gradwatch.records import RunInfo
from gradwatch.render.tensorboard.charts import NORM, PRESENT, RATE, VAL_ACCURACY
from gradwatch.render.tensorboard.protobuf import Layout, Margin


def layout(info: RunInfo) -> Layout:
    """Return the custom-scalars dashboard of a run."""
    # tags are regular expressions in TensorBoard; a margin chart takes plain tags
    ratio = "updates/log10_ratio_{}".format
    charts: dict[str, dict[str, Sequence[str] | Margin]] = {
        "Learning": {
            "loss; a dot is the onset of a problem, a triangle is NaN or Inf": [
                r"^curves/loss.*$",
                rf"^(?!{PRESENT})problems/.*$",
            ],
            "learning rate": [rf"^{RATE}.*$"],
            "total gradient norm": [rf"^{NORM}.*$"],
            "validation accuracy": [rf"^{VAL_ACCURACY}$"],
            "problems present": [rf"^{PRESENT}$"],
        },
        "Gradient flow": {
            "gradient norm of early, middle and late layers (log10)": [r"^gradients/log10_norm_.*$"],
        },
        "Updates": {
            "update/weight ratio (log10), median layer; shaded: the healthy band": Margin(
                ratio("median"), "updates/healthy_from", "updates/healthy_to"
            ),
            "update/weight ratio (log10), median layer; shaded: the slowest to the fastest tenth": Margin(
                ratio("median"), ratio("slowest"), ratio("fastest")
            ),
        },
        "Sparsity": {
            "zero gradients (worst layer)": [r"^sparsity/zero_gradient_frac$"],
            "dead units (worst layer)": [r"^sparsity/dead_units_frac$"],
            "saturated outputs (worst layer)": [r"^sparsity/saturated_frac$"],
        },
        "NaN and Inf": {"steps and layers with NaN or Inf; 0 is healthy": [r"^nonfinite/.*$"]},
    }
    if info.loss_scaling:  # without it, these charts would be empty
        charts["Loss scaling"] = {
            "loss scale": [r"^optim/loss_scale$"],
            "skipped updates": [r"^optim/skipped_frac$"],
        }
    charts["Speed"] = {  # added after loss scaling, so that speed stays last
        "samples per second": [r"^speed/samples_per_s$"],
        "milliseconds per step": [r"^speed/(step|data_wait|watch)_ms$"],
    }
    return charts
