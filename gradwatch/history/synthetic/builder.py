"""Made-up runs, healthy, sick or only looking so, for the examples and tests of detectors. Seeded."""

# T = steps, L = parameter tensors, A = activation modules

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Self, final

import numpy as np

from gradwatch.events import EventKind
from gradwatch.history.store import History
from gradwatch.history.synthetic import dynamics
from gradwatch.history.synthetic.dynamics import Optimizer, Precision
from gradwatch.records import Event, LayerInfo

Layers = int | Sequence[int] | None
"""One layer, several, or all of them (None); counted from the input side, from the end where negative."""


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
        optimizer: How updates follow from gradients.
        precision: Format of the forward pass; fp16 has a loss scale of 65536.
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
        silent_TA, silent_since_TA: Units that do not fire any more, and since which step.
        events: What happens besides; `note` adds to it.
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
        self.rates: list[float] = []
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
        of_relus = dynamics.relu_statistics(steps, activations=activations, width=width, rng=self.rng)
        self.dead_frac_TA, self.saturated_frac_TA, self.act_mean_TA, self.act_std_TA = of_relus
        self.silent_TA = np.zeros(self.dead_frac_TA.shape)
        self.silent_since_TA = np.full(self.dead_frac_TA.shape, np.nan)

    def names(self, layers: Layers = None) -> tuple[str, ...]:
        """Return the names of some layers, as `Example.layers` wants them."""
        return tuple(self.info.layers[i].name for i in self._pick(layers))

    def history(self, until: int | None = None) -> History:
        """Return the history of all steps, or of those before `until`."""
        history = History(self.info)
        for grown in self.replay(until):
            history = grown
        return history

    def note(
        self,
        kind: EventKind,
        *,
        step: int = 0,
        layer: str | None = None,
        text: str = "",
        values: Mapping[str, float] = MappingProxyType({}),
    ) -> Self:
        """Let an event happen at a step."""
        floats = {name: float(value) for name, value in values.items()}
        self.events.append(Event(kind=kind.name, step=step, layer=layer, text=text, values=floats))
        return self

    def replay(self, until: int | None = None) -> Iterator[History]:
        """Yield one growing history after each of its steps, as a live run would see it."""
        history = History(self.info, groups=1 + len(self.rates))
        run, param_TSL = self._run(), self._param_TSL()
        remembered = (self.silent_TA, self.silent_since_TA, np.full(self.silent_TA.shape, self.width))
        measured = (self.dead_frac_TA, self.saturated_frac_TA, self.act_mean_TA, self.act_std_TA)
        act_TSA = np.stack([*measured, *remembered], axis=1)
        for t in range(self.steps if until is None else until):
            sampled = t % dynamics.SAMPLE_EVERY == 0 and self.activations > 0
            row = {name: float(values_T[t]) for name, values_T in run.items()}
            for event in (e for e in self.events if e.step == t):
                history.note(event)
            history.append(t, run=row, param_SL=param_TSL[t], act_SL=act_TSA[t] if sampled else None)
            yield history

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
        self.silent_TA[onset:, act] = np.floor(fraction * self.width)
        self.silent_since_TA[onset:, act] = onset
        return self

    def saturated(self, act: int, *, fraction: float = 0.95, onset: int = 100, module_type: str = "Sigmoid") -> Self:
        """Push a fraction of a module's outputs into its flat tails; a Sigmoid unless said."""
        self.saturated_frac_TA[onset:, act] = fraction
        acts = list(self.info.activations)
        acts[act] = replace(acts[act], module_type=module_type)
        self.info = replace(self.info, activations=tuple(acts))
        return self

    # healthy, but looking ill

    def converging(self, *, decades: float = 4.0) -> Self:
        """Shrink all gradients together by so many decades while the loss falls with their square: success."""
        shrink_T = 10 ** (-decades * self.t_T / max(self.steps - 1, 1))
        self.grad_l2_TL *= shrink_T[:, None]
        self.loss_T *= shrink_T**2
        return self

    def warm_up(self, *, steps: int = 50, factor: float = 5.0) -> Self:
        """Raise the learning rate linearly over the first steps; gradients begin larger by a factor and settle."""
        self.lr_T *= np.minimum((self.t_T + 1) / steps, 1.0)
        self.grad_l2_TL *= 1 + (factor - 1) * np.exp(-self.t_T / (steps / 5))[:, None]
        return self

    def learning_rate_drop(self, *, step: int = 100, factor: float = 0.1) -> Self:
        """Drop the learning rate at a step: the loss falls at once, and gradients a little."""
        self.lr_T[step:] *= factor
        self.loss_T[step:] *= 0.6
        self.grad_l2_TL[step:] *= 0.7
        return self

    def loss_scale_skips(self, steps: Sequence[int] = (0, 1, 2)) -> Self:
        """Let the scaled gradients of an fp16 run overflow at some steps: skipped, and the scale halved."""
        self.info = replace(self.info, precision="fp16", loss_scaling=True)
        at = list(steps)
        self.skipped_T[at] = 1.0
        self.grad_l2_TL[at], self.nonfinite_TL[at] = np.inf, self.numel // 10
        halvings_T = np.cumsum(self.skipped_T) - self.skipped_T
        self.loss_scale_T[:] = dynamics.INITIAL_SCALE * 0.5**halvings_T
        return self

    def sparse_embedding(self, layer: int = 0, *, zero_frac: float = 0.97) -> Self:
        """Make a layer an embedding: most of its rows are looked up by no sample of a batch."""
        self._change(layer, module_type="Embedding")
        unused_T = zero_frac + 0.2 * (1 - zero_frac) * self.rng.standard_normal(self.steps)
        self.zero_frac_TL[:, layer] = np.clip(unused_T, 0, 1)
        return self

    def zero_initialised(self, layer: int, *, ramp: int = 20) -> Self:
        """Begin with a layer of zero weights: what lies before it in its branch has no gradient until it grows."""
        assert layer > 0, "a branch needs a layer before its last one"
        open_T = np.minimum(self.t_T / ramp, 1.0)
        self.weight_l2_TL[:, layer] *= open_T
        self.grad_l2_TL[:, layer - 1] *= open_T
        self.zero_frac_TL[0, layer - 1] = 1.0
        return self

    def frozen(self, layer: Layers) -> Self:
        """Freeze a layer on purpose: it requires no gradient, and no optimizer holds it."""
        for i in self._pick(layer):
            self._change(i, trainable=False, group=None)
        return self.no_gradient(layer)

    def own_rate(self, layer: int, *, factor: float) -> Self:
        """Put a layer into a group of its own, whose rate is so many times that of the others."""
        self.rates.append(factor)
        self._change(layer % self.layers, group=len(self.rates))
        self.update_factor_TL[:, layer] *= factor
        return self

    # inside

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
        self.batch_hash_T = self.rng.integers(0, 1 << 48, self.steps).astype(np.float64)

    def _run(self) -> dict[str, dynamics.Array]:
        measured = {
            "loss": self.loss_T,
            "val_loss": self.val_loss_T,
            "val_accuracy": self.val_accuracy_T,
            "loss_scale": self.loss_scale_T,
            "skipped": self.skipped_T,
            "batch_hash": self.batch_hash_T,
            "lr.0": self.lr_T,
            **{f"lr.{i}": factor * self.lr_T for i, factor in enumerate(self.rates, start=1)},
        }
        return dynamics.run_statistics(grad_l2_TL=self.grad_l2_TL, nonfinite_TL=self.nonfinite_TL, measured=measured)

    def _param_TSL(self) -> dynamics.Floats32:
        rms_TL = self.grad_l2_TL / np.sqrt(self.numel)
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


def healthy(
    *,
    layers: int = 12,
    steps: int = 200,
    seed: int = 0,
    noise: float = 0.3,
    activations: int = 0,
    optimizer: Optimizer = "AdamW",
    precision: Precision = "fp32",
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
