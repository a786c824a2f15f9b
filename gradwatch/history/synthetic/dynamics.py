"""Compute the statistics of a synthetic run: loss, gradients, updates and times that fit together."""

# T = steps, L = parameter tensors, A = activation modules, S = statistics

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from gradwatch import catalogue
from gradwatch.records import ActivationInfo, LayerInfo, RunInfo

Array = NDArray[np.float64]
Floats32 = NDArray[np.float32]
Optimizer = Literal["SGD", "Adam", "AdamW"]
Precision = Literal["fp32", "bf16", "fp16"]

SAMPLE_EVERY = 10
"""Steps between two measurements of weights, updates and activations, the default of `watch.updates_every`."""
BATCH = 64
STEP_MS = 10.0
START_LOSS, FLOOR_LOSS = 2.3, 0.1  # chance level of 10 classes, ln 10; labels that no model can predict
GRADIENT_NOISE = 0.3
"""Gradient norm of the batch noise when the loss is at its floor, in units of the first gradient."""
ADAM_EPS = 1e-8  # torch.optim.AdamW, default of eps
ADAM_STEP = 0.3
"""Size of a typical Adam update in units of the learning rate. It is below 1 because gradients change their sign."""
CREST = 1.3
"""Largest gradient element relative to the largest of a normal distribution: gradients have heavier tails."""
INITIAL_SCALE = 65536.0  # torch.amp.GradScaler, default of init_scale


def describe(
    *, layers: int, activations: int, width: int, steps: int, optimizer: Optimizer, precision: Precision
) -> RunInfo:
    """Return the description of a synthetic run with square linear layers `layers.<i>` and ReLUs `acts.<i>`."""
    return RunInfo(
        name="synthetic",
        created="2026-01-01T00:00:00+00:00",
        layers=tuple(
            LayerInfo(
                name=f"layers.{i}.weight",
                module=f"layers.{i}",
                module_type="Linear",
                shape=(width, width),
                dtype="float32",
                trainable=True,
                group=0,
            )
            for i in range(layers)
        ),
        activations=tuple(ActivationInfo(name=f"acts.{i}", module_type="ReLU") for i in range(activations)),
        precision=precision,
        loss_scaling=precision == "fp16",
        optimizer=optimizer,
        total_steps=steps,
    )


def learning_curve(steps: int) -> Array:
    """Return the excess of the loss over its floor: a power law of the step that starts at 1."""
    curve_T: Array = (1 + np.arange(steps) / 40) ** -1.0
    return curve_T


def gradient_norms(signal_T: Array, *, layers: int, noise: float, rng: np.random.Generator) -> Array:
    """Return norms of shape (T, L): the root of the excess loss, with log-normal noise partly common to all layers."""
    size_L = 0.1 * np.exp(0.4 * rng.standard_normal(layers))
    level_T = np.sqrt(signal_T + GRADIENT_NOISE**2)
    common_T = rng.standard_normal(len(signal_T))
    own_TL = rng.standard_normal((len(signal_T), layers))
    # 1/4 of the variance is common to all layers, since all see the same batch; 0.5^2 + 0.866^2 = 1
    norms_TL: Array = size_L * level_T[:, None] * np.exp(noise * (0.5 * common_T[:, None] + 0.866 * own_TL))
    return norms_TL


def updates(rms_TL: Array, *, lr_T: Array, factor_TL: Array, numel: int, optimizer: str) -> Array:
    """Return norms of the update. SGD steps along the gradient; Adam steps along its sign if it exceeds eps."""
    with np.errstate(invalid="ignore", over="ignore"):  # the update of an infinite gradient is skipped
        step_TL = rms_TL if optimizer == "SGD" else ADAM_STEP * rms_TL / (rms_TL + ADAM_EPS)
        update_TL: Array = np.nan_to_num(lr_T[:, None] * np.sqrt(numel) * step_TL, nan=0.0) * factor_TL
    return update_TL


def relu_statistics(
    steps: int, *, activations: int, width: int, rng: np.random.Generator
) -> tuple[Array, Array, Array, Array]:
    """Return dead fraction, saturated fraction, mean and standard deviation of ReLU outputs, each of shape (T, A)."""
    shape = (steps, activations)
    dead_frac_TA = rng.binomial(width, 0.02, shape) / width
    saturated_frac_TA = 0.5 + 0.02 * rng.standard_normal(shape)
    # moments of the positive part of a standard normal variable: 0.399 and 0.584
    mean_TA = 0.399 * np.exp(0.05 * rng.standard_normal(shape))
    std_TA = 0.584 * np.exp(0.05 * rng.standard_normal(shape))
    return dead_frac_TA, saturated_frac_TA, mean_TA, std_TA


def parameter_statistics(
    l2_TL: Array, *, zero_frac_TL: Array, nonfinite_TL: Array, weight_l2_TL: Array, update_TL: Array, numel: int
) -> Floats32:
    """Return all statistics of the parameters, of shape (T, S, L), from norms and fractions of zeros.

    Args:
        l2_TL: Gradient norms.
        zero_frac_TL: Fraction of exact zeros in the gradients.
        nonfinite_TL: Number of non-finite elements.
        weight_l2_TL: Weight norms.
        update_TL: Update norms.
        numel: Elements of each tensor.
    """
    rng = np.random.default_rng(2)  # a fixed seed of its own: editing a run leaves its other numbers unchanged
    with np.errstate(all="ignore"):
        rms_TL = l2_TL / np.sqrt(numel)
        # the expected maximum of n normal elements is sqrt(2 ln n) standard deviations
        nonzero_TL = np.maximum(numel * (1 - zero_frac_TL), 1.0)
        peak_TL = l2_TL / np.sqrt(nonzero_TL) * np.maximum(CREST * np.sqrt(2 * np.log(nonzero_TL)), 1.0)
        mean_TL = rms_TL * np.clip(rng.standard_normal(l2_TL.shape) / np.sqrt(numel), -0.9, 0.9)
        by_name = {
            "grad.l2": l2_TL,
            "grad.absmax": np.minimum(peak_TL, l2_TL),  # no element exceeds the norm
            "grad.mean": mean_TL,
            "grad.std": np.sqrt(rms_TL**2 - mean_TL**2),
            "grad.zero_frac": zero_frac_TL,
            "grad.nonfinite": nonfinite_TL,
            "weight.l2": _sampled(weight_l2_TL),
            "update.ratio": _sampled(update_TL / weight_l2_TL),
        }
        return np.stack([by_name[name] for name in catalogue.PARAM_NAMES], axis=1).astype(np.float32)


def run_statistics(*, grad_l2_TL: Array, nonfinite_TL: Array, measured: dict[str, Array]) -> dict[str, Array]:
    """Return the statistics of the run by name: the given ones, the total norm, and plausible times."""
    rng = np.random.default_rng(1)
    steps = len(grad_l2_TL)
    norm_T = np.sqrt(np.nansum(grad_l2_TL**2, axis=1))
    norm_T[np.nansum(nonfinite_TL, axis=1) > 0] = np.nan
    step_ms_T = STEP_MS * np.exp(0.05 * rng.standard_normal(steps))
    return measured | {
        "grad_norm.before_clip": norm_T,
        "grad_norm.after_clip": norm_T,
        "step_ms": step_ms_T,
        "data_wait_ms": 0.02 * step_ms_T,
        "samples_per_s": BATCH / step_ms_T * 1e3,
        "peak_memory_bytes": np.full(steps, 1e9),
        "watch_ms": np.full(steps, 0.01 * STEP_MS),
    }


def _sampled(values_TL: Array) -> Array:
    is_measured_T = np.arange(len(values_TL)) % SAMPLE_EVERY == 0
    return np.where(is_measured_T[:, None], values_TL, np.nan)
