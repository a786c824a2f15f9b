"""Build the history of a healthy, seeded synthetic run from arrays of every statistic."""

# T = steps, L = parameter tensors, A = activation modules

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Self

import numpy as np

from gradwatch.events import EventKind
from gradwatch.history.store import History
from gradwatch.history.synthetic import dynamics
from gradwatch.history.synthetic.dynamics import Optimizer, Precision
from gradwatch.records import Event, LayerInfo

Layers = int | Sequence[int] | None
"""Index of a layer from the input side, several indices, or None for all layers. Negative ones count from the end."""


class HealthyRun:
    """A healthy synthetic run. Edit its arrays, then call `history`; `Synthetic` has a method for each fault.

    The loss falls towards a floor as a power law. The gradient norm of a layer is the root of the excess loss plus a
    constant, times log-normal noise. Part of the noise is common to all layers. `history` computes the statistics that
    follow from these arrays (absmax, mean, std, total norm, update ratio).

    Args:
        layers: Number of parameter tensors, called `layers.<i>.weight`, from the input side.
        steps: Number of optimizer steps.
        seed: Seed of all randomness.
        noise: Standard deviation of the natural logarithm of gradient norms from step to step.
        activations: Number of ReLU modules, called `acts.<i>`.
        optimizer: Optimizer that turns gradients into updates.
        precision: Format of the forward pass. fp16 has a loss scale of 65536.
        width: Side of the square weights.
        lr: Learning rate.

    Attributes:
        loss_T, val_loss_T, val_accuracy_T, lr_T, loss_scale_T, skipped_T, batch_hash_T: Statistics of the run.
        grad_l2_TL: Gradient norms; nan for a gradient that is None.
        zero_frac_TL: Fraction of exact zeros in the gradients.
        nonfinite_TL: Number of non-finite gradient elements. If it is not 0, grad_l2_TL should be nan or inf.
        weight_l2_TL: Weight norms.
        update_factor_TL: Factor on the update that follows from gradient, learning rate and optimizer.
        dead_frac_TA, saturated_frac_TA, act_mean_TA, act_std_TA: Statistics of the activations.
        max_logit_TA, attention_entropy_TA: Statistics of attention; nan for every other activation.
        silent_TA, silent_since_TA: Number of silent units, and the first step of their silence.
        policy: Statistics of a policy by name; empty for a loss that is not a policy gradient.
        events: Events of the run; `add_event` adds to them.
    """

    def __init__(
        self,
        *,
        layers: int = 12,
        steps: int = 200,
        seed: int = 0,
        noise: float = 0.3,
        activations: int = 0,
        optimizer: Optimizer = "AdamW",
        precision: Precision = "fp32",
        width: int = 64,
        lr: float = 1e-3,
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.steps, self.layers, self.activations = steps, layers, activations
        self.width, self.numel = width, width * width
        self.t_T = np.arange(steps)
        self.events: list[Event] = []
        self.policy: dict[str, dynamics.Array] = {}
        self.rates: list[float] = []  # learning rates of further groups, relative to the first
        self.info = dynamics.describe(
            layers=layers,
            activations=activations,
            width=width,
            steps=steps,
            optimizer=optimizer,
            precision=precision,
        )
        self.signal_T = dynamics.learning_curve(steps)
        self._begin_run(lr)
        self.grad_l2_TL = dynamics.gradient_norms(self.signal_T, layers=layers, noise=noise, rng=self.rng)
        self.zero_frac_TL = np.zeros((steps, layers))
        self.nonfinite_TL = np.zeros((steps, layers))
        # the norm of a square weight with variance 1 / fan_in, growing as a random walk
        self.weight_l2_TL = np.sqrt(width * (1 + 1e-4 * self.t_T[:, None] * np.ones((steps, layers))))
        self.update_factor_TL = np.exp(0.1 * self.rng.standard_normal((steps, layers)))
        relu_arrays = dynamics.relu_statistics(steps, activations=activations, width=width, rng=self.rng)
        self.dead_frac_TA, self.saturated_frac_TA, self.act_mean_TA, self.act_std_TA = relu_arrays
        self.silent_TA = np.zeros(self.dead_frac_TA.shape)
        self.silent_since_TA = np.full(self.dead_frac_TA.shape, np.nan)
        self.max_logit_TA = np.full(self.dead_frac_TA.shape, np.nan)
        self.attention_entropy_TA = np.full(self.dead_frac_TA.shape, np.nan)

    def names(self, layers: Layers = None) -> tuple[str, ...]:
        """Return the names of layers, for `Example.layers`."""
        return tuple(self.info.layers[i].name for i in self._pick(layers))

    def history(self, until: int | None = None) -> History:
        """Return the history of all steps, or of the steps before `until`."""
        history = History(self.info)
        for grown in self.replay(until):
            history = grown
        return history

    def add_event(
        self,
        kind: EventKind,
        *,
        step: int = 0,
        layer: str | None = None,
        text: str = "",
        values: Mapping[str, float] = MappingProxyType({}),
    ) -> Self:
        """Emit an event at a step."""
        floats = {name: float(value) for name, value in values.items()}
        self.events.append(Event(kind=kind.name, step=step, layer=layer, text=text, values=floats))
        return self

    def replay(self, until: int | None = None) -> Iterator[History]:
        """Yield one growing history after each of its steps, as in a live run."""
        history = History(self.info, groups=1 + len(self.rates))  # the first group has no factor in `rates`
        run, param_TSL = self._run(), self._param_TSL()
        remembered = (self.silent_TA, self.silent_since_TA, np.full(self.silent_TA.shape, self.width))
        measured = (self.dead_frac_TA, self.saturated_frac_TA, self.act_mean_TA, self.act_std_TA)
        attention = (self.max_logit_TA, self.attention_entropy_TA)
        act_TSA = np.stack([*measured, *attention, *remembered], axis=1)
        for t in range(self.steps if until is None else until):
            sampled = t % dynamics.SAMPLE_EVERY == 0 and self.activations > 0
            row = {name: float(values_T[t]) for name, values_T in run.items()}
            # before the row: a live run emits the events of a step before it feeds the row
            for event in (e for e in self.events if e.step == t):
                history.add_event(event)
            history.append(t, run=row, param_SL=param_TSL[t], act_SL=act_TSA[t] if sampled else None)
            yield history

    def _pick(self, layers: Layers) -> list[int]:
        if layers is None:
            return list(range(self.layers))
        return [layers % self.layers] if isinstance(layers, int) else [i % self.layers for i in layers]

    def _change(self, layer: int, **changes: object) -> None:
        layers: list[LayerInfo] = list(self.info.layers)
        layers[layer] = replace(layers[layer], **changes)  # type: ignore[arg-type]  # fields of LayerInfo
        self.info = replace(self.info, layers=tuple(layers))

    def _begin_run(self, lr: float) -> None:
        excess_T = (dynamics.START_LOSS - dynamics.FLOOR_LOSS) * self.signal_T
        self.loss_T = (dynamics.FLOOR_LOSS + excess_T) * np.exp(0.03 * self.rng.standard_normal(self.steps))
        self.val_loss_T = np.full(self.steps, np.nan)
        self.val_accuracy_T = np.full(self.steps, np.nan)
        self.lr_T = np.full(self.steps, lr)
        self.loss_scale_T = np.full(self.steps, dynamics.INITIAL_SCALE if self.info.loss_scaling else 1.0)
        self.skipped_T = np.zeros(self.steps)
        # 48 bits, which a float64 holds exactly
        self.batch_hash_T = self.rng.integers(0, 1 << 48, self.steps).astype(np.float64)

    def _run(self) -> dict[str, dynamics.Array]:
        measured = {
            "loss": self.loss_T,
            "val_loss": self.val_loss_T,
            "val_accuracy": self.val_accuracy_T,
            "loss_scale": self.loss_scale_T,
            "skipped": self.skipped_T,
            "batch_hash": self.batch_hash_T,
            **self.policy,
            "lr.0": self.lr_T,
            **{f"lr.{i}": factor * self.lr_T for i, factor in enumerate(self.rates, start=1)},
        }
        return dynamics.run_statistics(grad_l2_TL=self.grad_l2_TL, nonfinite_TL=self.nonfinite_TL, measured=measured)

    def _param_TSL(self) -> dynamics.Floats32:
        rms_TL = self.grad_l2_TL / np.sqrt(self.numel)
        # a skipped step moves nothing
        moved_lr_T = self.lr_T * (1 - self.skipped_T)
        update_TL = dynamics.updates(
            rms_TL,
            lr_T=moved_lr_T,
            factor_TL=self.update_factor_TL,
            numel=self.numel,
            optimizer=self.info.optimizer,
        )
        return dynamics.parameter_statistics(
            self.grad_l2_TL,
            zero_frac_TL=self.zero_frac_TL,
            nonfinite_TL=self.nonfinite_TL,
            weight_l2_TL=self.weight_l2_TL,
            update_TL=update_TL,
            numel=self.numel,
        )
