"""Made-up runs, healthy and sick, for the examples of detectors: small physical models of a training, seeded."""

# T = steps, L = parameter tensors, A = activation modules

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal, Self, final

import numpy as np
from numpy.typing import NDArray

from gradwatch import catalogue
from gradwatch.history.store import History
from gradwatch.records import ActivationInfo, LayerInfo, RunInfo

Array = NDArray[np.float64]
Layers = int | Sequence[int] | None
"""One layer, several, or all of them (None); counted from the input side."""

BATCH = 64
SAMPLE_EVERY = 10
"""Steps between two measurements of weights, updates and activations, as `watch.updates_every` has it."""
ADAM_EPS = 1e-8  # torch.optim.AdamW, default of eps
ADAM_STEP = 0.3
"""Size of a typical Adam update in units of the learning rate: the sign of the gradient is not quite steady."""
CREST = 1.3
"""Largest element of a gradient in units of what a normal distribution would give: gradients have heavier tails."""


@final
class Synthetic:
    """A made-up run. Its arrays start healthy; edit them by method or by hand, then ask for the history.

    The loss falls as a power law towards a floor; the gradient of every layer is a signal that follows the root of
    the excess loss plus the constant noise of the batch, times log-normal noise, part of it common to all layers.
    What follows from these (absmax, mean, std, total norm, update ratio) is computed when the history is made.

    Args:
        layers: Parameter tensors, called `layers.<i>.weight`, the input side first.
        steps: Optimizer steps.
        seed: Seed of all randomness.
        noise: Standard deviation of the natural logarithm of gradient norms from step to step.
        activations: ReLU modules, called `acts.<i>`.
        optimizer: `SGD`, `Adam` or `AdamW`: how updates follow from gradients.
        precision: `fp32`, `bf16` or `fp16`; fp16 has a loss scale of 65536.
        width: Side of the square weights.
        lr: Learning rate.

    Attributes:
        loss_T, val_loss_T, val_accuracy_T, lr_T, loss_scale_T, skipped_T, batch_hash_T: Statistics of the run.
        grad_l2_TL: Gradient norms. nan is a gradient that is None; see nonfinite_TL for one that holds nan.
        zero_frac_TL: Fraction of exact zeros in the gradients.
        nonfinite_TL: Number of non-finite elements; where it is not 0, grad_l2_TL should be nan or inf.
        weight_l2_TL: Weight norms.
        update_factor_TL: Factor on the update that follows from gradient, learning rate and optimizer.
        dead_frac_TA, saturated_frac_TA, act_mean_TA, act_std_TA: Statistics of the activations.
    """

    def __init__(
        self,
        *,
        layers: int = 12,
        steps: int = 200,
        seed: int = 0,
        noise: float = 0.3,
        activations: int = 0,
        optimizer: Literal["SGD", "Adam", "AdamW"] = "AdamW",
        precision: Literal["fp32", "bf16", "fp16"] = "fp32",
        width: int = 64,
        lr: float = 1e-3,
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.steps, self.layers, self.activations = steps, layers, activations
        self.numel = width * width
        self.info = RunInfo(
            name="synthetic",
            created="2026-01-01T00:00:00+00:00",
            layers=tuple(_layer(i, width) for i in range(layers)),
            activations=tuple(ActivationInfo(name=f"acts.{i}", module_type="ReLU") for i in range(activations)),
            precision=precision,
            loss_scaling=precision == "fp16",
            optimizer=optimizer,
            total_steps=steps,
        )
        self.t_T = np.arange(steps)
        self._healthy_run(lr)
        self._healthy_gradients(noise)
        self._healthy_activations(width)

    def names(self, layers: Layers = None) -> tuple[str, ...]:
        """Return the names of some layers, as `Example.layers` wants them."""
        return tuple(self.info.layers[i].name for i in self._pick(layers))

    def _pick(self, layers: Layers) -> list[int]:
        if layers is None:
            return list(range(self.layers))
        return [layers % self.layers] if isinstance(layers, int) else [i % self.layers for i in layers]

    def _healthy_run(self, lr: float) -> None:
        start, floor = 2.3, 0.1
        self.signal_T = (1 + self.t_T / 40) ** -1.0
        self.loss_T = (floor + (start - floor) * self.signal_T) * np.exp(0.03 * self.rng.standard_normal(self.steps))
        self.val_loss_T = np.full(self.steps, np.nan)
        self.val_accuracy_T = np.full(self.steps, np.nan)
        self.lr_T = np.full(self.steps, lr)
        self.loss_scale_T = np.full(self.steps, 65536.0 if self.info.loss_scaling else 1.0)
        self.skipped_T = np.zeros(self.steps)
        self.batch_hash_T = self.rng.integers(0, 1 << 48, self.steps).astype(np.float64)

    def _healthy_gradients(self, noise: float) -> None:
        shape = (self.steps, self.layers)
        size_L = 0.1 * np.exp(0.4 * self.rng.standard_normal(self.layers))
        level_T = np.sqrt(self.signal_T + 0.3**2)
        common_T = self.rng.standard_normal(self.steps)
        own_TL = self.rng.standard_normal(shape)
        self.grad_l2_TL = size_L * level_T[:, None] * np.exp(noise * (0.5 * common_T[:, None] + 0.866 * own_TL))
        self.zero_frac_TL = np.zeros(shape)
        self.nonfinite_TL = np.zeros(shape)
        # the norm of a square weight with variance 1 / fan_in, growing as a random walk
        self.weight_l2_TL = np.sqrt(np.sqrt(self.numel) * (1 + 1e-4 * self.t_T[:, None] * np.ones(shape)))
        self.update_factor_TL = np.exp(0.1 * self.rng.standard_normal(shape))

    def _healthy_activations(self, width: int) -> None:
        shape = (self.steps, self.activations)
        self.dead_frac_TA = self.rng.binomial(width, 0.02, shape) / width
        self.saturated_frac_TA = 0.5 + 0.02 * self.rng.standard_normal(shape)
        # moments of the positive part of a standard normal variable: 0.399 and 0.584
        self.act_mean_TA = 0.399 * np.exp(0.05 * self.rng.standard_normal(shape))
        self.act_std_TA = 0.584 * np.exp(0.05 * self.rng.standard_normal(shape))

    # illnesses

    def vanishing(self, *, decades: float = 8.0, onset: int = 0) -> Self:
        """Shrink gradients geometrically towards the input, by so many decades in all; the loss stops falling."""
        depth_L = np.linspace(1, 0, self.layers)
        self.grad_l2_TL[onset:] *= 10 ** (-decades * depth_L)
        self.loss_T[onset:] = self.loss_T[onset] * np.exp(0.02 * self.rng.standard_normal(self.steps - onset))
        return self

    def exploding(self, *, rate: float = 1.2, onset: int = 100, layers: Layers = None) -> Self:
        """Grow gradients by a factor per step from onset on, and the loss with them, until they overflow."""
        growth_T = rate ** np.maximum(self.t_T - onset, 0.0)
        self.grad_l2_TL[:, self._pick(layers)] *= growth_T[:, None]
        self.loss_T *= np.sqrt(growth_T)
        overflow_TL = self.grad_l2_TL > np.finfo(np.float32).max
        self.grad_l2_TL[overflow_TL] = np.inf
        self.nonfinite_TL[overflow_TL] = self.numel
        return self

    def dead(self, layer: Layers, *, onset: int = 100, level: float = 0.0) -> Self:
        """Freeze the gradient norm of a layer at a level, 0 by default; the others go on."""
        i = self._pick(layer)
        self.grad_l2_TL[onset:, i] = level
        self.zero_frac_TL[onset:, i] = 1.0 if level == 0 else self.zero_frac_TL[onset:, i]
        return self

    def rising_sparsity(self, layer: Layers, *, rate: float = 0.005, onset: int = 50, most: float = 0.98) -> Self:
        """Let the zero fraction of a layer's gradient creep up by so much per step: units die one by one."""
        i = self._pick(layer)
        zero_T = np.clip(rate * (self.t_T - onset), 0, most)[:, None]
        self.zero_frac_TL[:, i] = np.maximum(self.zero_frac_TL[:, i], zero_T)
        self.grad_l2_TL[:, i] *= np.sqrt(1 - zero_T)
        return self

    def oscillating(self, *, factor: float = 30.0, onset: int = 50, layers: Layers = None, period: int = 2) -> Self:
        """Let norms bounce by a factor up and down between updates, and the loss with them."""
        swing_T = np.where(self.t_T >= onset, np.where(self.t_T % period < period / 2, 0.5, -0.5), 0.0)
        self.grad_l2_TL[:, self._pick(layers)] *= factor ** swing_T[:, None]
        self.loss_T *= 2.0**swing_T
        return self

    def spike(self, *, step: int = 150, factor: float = 100.0, layers: Layers = None) -> Self:
        """Multiply the gradients of a single step."""
        self.grad_l2_TL[step, self._pick(layers)] *= factor
        return self

    def no_gradient(self, layer: Layers, *, zero: bool = False) -> Self:
        """Cut a layer from the graph: its gradient is None at every step, or exactly zero."""
        i = self._pick(layer)
        self.grad_l2_TL[:, i] = 0.0 if zero else np.nan
        self.zero_frac_TL[:, i] = 1.0 if zero else np.nan
        self.nonfinite_TL[:, i] = 0.0 if zero else np.nan
        return self

    def imbalance(self, layer: Layers, *, factor: float = 1000.0) -> Self:
        """Multiply gradient and update of a layer at every step."""
        i = self._pick(layer)
        self.grad_l2_TL[:, i] *= factor
        self.update_factor_TL[:, i] *= factor if self.info.optimizer != "SGD" else 1.0
        return self

    def non_finite(
        self, *, step: int = 150, layers: Layers = None, value: float = np.nan, count: int = 1, lasting: bool = False
    ) -> Self:
        """Put nan or inf into gradients at one step, or from that step on (the loss too)."""
        at = slice(step, None) if lasting else slice(step, step + 1)
        for i in self._pick(layers):
            self.grad_l2_TL[at, i] = value
            self.nonfinite_TL[at, i] = count
        if lasting:
            self.loss_T[step:] = value
        return self

    def dead_relu(self, act: int, *, fraction: float = 0.95, onset: int = 100) -> Self:
        """Let a fraction of a ReLU's units never fire again; mean and deviation shrink with them."""
        self.dead_frac_TA[onset:, act] = fraction
        self.act_mean_TA[onset:, act] *= 1 - fraction
        self.act_std_TA[onset:, act] *= np.sqrt(1 - fraction)
        return self

    def saturated(self, act: int, *, fraction: float = 0.95, onset: int = 100, module_type: str = "Sigmoid") -> Self:
        """Push a fraction of a module's outputs into its flat tails; a Sigmoid unless said."""
        self.saturated_frac_TA[onset:, act] = fraction
        acts = list(self.info.activations)
        acts[act] = replace(acts[act], module_type=module_type)
        self.info = replace(self.info, activations=tuple(acts))
        return self

    # replay

    def history(self, until: int | None = None) -> History:
        """Return the history of all steps, or of those before `until`."""
        history = History(self.info)
        for history in self.replay(until):  # noqa: B007 - the last one is wanted
            pass
        return history

    def replay(self, until: int | None = None) -> Iterator[History]:
        """Yield one growing history after each of its steps, as a live run would see it."""
        history = History(self.info)
        run, param_TSL = self._run(), self._param_TSL()
        act_TSA = np.stack([self.dead_frac_TA, self.saturated_frac_TA, self.act_mean_TA, self.act_std_TA], axis=1)
        for t in range(self.steps if until is None else until):
            sampled = t % SAMPLE_EVERY == 0 and self.activations > 0
            row = {name: float(values_T[t]) for name, values_T in run.items()}
            history.append(t, run=row, param_SL=param_TSL[t], act_SL=act_TSA[t] if sampled else None)
            yield history

    def _run(self) -> dict[str, Array]:
        """Return the statistics of the run by name."""
        rng = np.random.default_rng(1)
        norm_T = np.sqrt(np.nansum(self.grad_l2_TL**2, axis=1))
        norm_T[np.nansum(self.nonfinite_TL, axis=1) > 0] = np.nan
        step_ms_T = 10 * np.exp(0.05 * rng.standard_normal(self.steps))
        return {
            "loss": self.loss_T,
            "val_loss": self.val_loss_T,
            "val_accuracy": self.val_accuracy_T,
            "grad_norm.before_clip": norm_T,
            "grad_norm.after_clip": norm_T,
            "loss_scale": self.loss_scale_T,
            "skipped": self.skipped_T,
            "step_ms": step_ms_T,
            "data_wait_ms": 0.02 * step_ms_T,
            "samples_per_s": BATCH / step_ms_T * 1e3,
            "peak_memory_bytes": np.full(self.steps, 1e9),
            "batch_hash": self.batch_hash_T,
            "watch_ms": np.full(self.steps, 0.1),
            "lr.0": self.lr_T,
        }

    def _param_TSL(self) -> NDArray[np.float32]:  # noqa: N802 - shapes end the name
        """Return all statistics of the parameters, of shape (T, S, L), those that follow from others computed."""
        rng = np.random.default_rng(2)
        l2_TL, n = self.grad_l2_TL, self.numel
        with np.errstate(all="ignore"):
            rms_TL = l2_TL / np.sqrt(n)
            nonzero_TL = np.maximum(n * (1 - self.zero_frac_TL), 1.0)
            peak_TL = l2_TL / np.sqrt(nonzero_TL) * np.maximum(CREST * np.sqrt(2 * np.log(nonzero_TL)), 1.0)
            absmax_TL = np.minimum(peak_TL, l2_TL)
            mean_TL = rms_TL * np.clip(rng.standard_normal(l2_TL.shape) / np.sqrt(n), -0.9, 0.9)
            std_TL = np.sqrt(rms_TL**2 - mean_TL**2)
            values = [l2_TL, absmax_TL, mean_TL, std_TL, self.zero_frac_TL, self.nonfinite_TL]
            values += [self.weight_l2_TL.copy(), self._update_TL(rms_TL) / self.weight_l2_TL]
            param_TSL = np.stack(values, axis=1).astype(np.float32)
        sampled_T = self.t_T % SAMPLE_EVERY == 0
        late = [catalogue.PARAM_NAMES.index(name) for name in ("weight.l2", "update.ratio")]
        param_TSL[np.ix_(~sampled_T, late)] = np.nan
        return param_TSL

    def _update_TL(self, rms_TL: Array) -> Array:  # noqa: N802 - shapes end the name
        """Return the norm of the update: SGD steps along the gradient, Adam by its sign where it exceeds eps."""
        lr_TL = (self.lr_T * (1 - self.skipped_T))[:, None]
        if self.info.optimizer == "SGD":
            step_TL = rms_TL
        else:
            step_TL = ADAM_STEP * rms_TL / (rms_TL + ADAM_EPS)
        return np.nan_to_num(lr_TL * np.sqrt(self.numel) * step_TL * self.update_factor_TL, nan=0.0)


def _layer(i: int, width: int) -> LayerInfo:
    return LayerInfo(
        name=f"layers.{i}.weight",
        module=f"layers.{i}",
        module_type="Linear",
        shape=(width, width),
        dtype="float32",
        trainable=True,
        group=0,
    )


def healthy(
    *,
    layers: int = 12,
    steps: int = 200,
    seed: int = 0,
    noise: float = 0.3,
    activations: int = 0,
    optimizer: Literal["SGD", "Adam", "AdamW"] = "AdamW",
    precision: Literal["fp32", "bf16", "fp16"] = "fp32",
) -> History:
    """Return the history of a healthy run; see `Synthetic` for the arguments."""
    return Synthetic(
        layers=layers,
        steps=steps,
        seed=seed,
        noise=noise,
        activations=activations,
        optimizer=optimizer,
        precision=precision,
    ).history()
