"""Build seeded synthetic runs that have faults, or only look faulty, for examples and tests of detectors."""

# T = steps, L = parameter tensors, A = activation modules

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Self, final

import numpy as np

from gradwatch.history.synthetic import dynamics
from gradwatch.history.synthetic.healthy import HealthyRun, Layers


@final
class Synthetic(HealthyRun):
    """A synthetic run with a method per fault. Each method returns the run. Arguments as for `HealthyRun`."""

    def vanishing(self, *, decades: float = 8.0, onset: int = 0) -> Self:
        """Shrink gradients geometrically towards the input, by `decades` over all layers, and stop the loss."""
        depth_L = np.linspace(1, 0, self.layers)
        self.grad_l2_TL[onset:] *= 10 ** (-decades * depth_L)
        self.loss_T[onset:] = self.loss_T[onset] * np.exp(0.02 * self.rng.standard_normal(self.steps - onset))
        return self

    def exploding(self, *, rate: float = 1.2, onset: int = 100, layers: Layers = None) -> Self:
        """Grow gradients and loss by a factor per step from `onset`, until the gradients overflow."""
        growth_T = rate ** np.maximum(self.t_T - onset, 0.0)
        self.grad_l2_TL[:, self._pick(layers)] *= growth_T[:, None]
        self.loss_T *= np.sqrt(growth_T)
        # the statistics are recorded in float32
        overflow_TL = self.grad_l2_TL > np.finfo(np.float32).max
        self.grad_l2_TL[overflow_TL] = np.inf
        self.nonfinite_TL[overflow_TL] = self.numel
        return self

    def dead(self, layer: Layers, *, onset: int = 100, level: float = 0.0) -> Self:
        """Set the gradient norm of a layer to a level."""
        i = self._pick(layer)
        self.grad_l2_TL[onset:, i] = level
        self.zero_frac_TL[onset:, i] = 1.0 if level == 0 else self.zero_frac_TL[onset:, i]
        return self

    def rising_sparsity(self, layer: Layers, *, rate: float = 0.005, onset: int = 50, most: float = 0.98) -> Self:
        """Raise the zero fraction of a gradient by `rate` per step, like units that die one after another."""
        i = self._pick(layer)
        zero_T = np.clip(rate * (self.t_T - onset), 0, most)[:, None]
        self.zero_frac_TL[:, i] = np.maximum(self.zero_frac_TL[:, i], zero_T)
        self.grad_l2_TL[:, i] *= np.sqrt(1 - zero_T)  # the norm of the elements that are left
        return self

    def oscillating(self, *, factor: float = 30.0, onset: int = 50, period: int = 2) -> Self:
        """Let gradient norms oscillate by a factor, and the loss by a factor of 2."""
        swing_T = np.where(self.t_T >= onset, np.where(self.t_T % period < period / 2, 0.5, -0.5), 0.0)
        self.grad_l2_TL *= factor ** swing_T[:, None]
        self.loss_T *= 2.0**swing_T
        return self

    def spike(self, *, step: int = 150, factor: float = 100.0, layers: Layers = None) -> Self:
        """Multiply the gradients of one step by a factor."""
        self.grad_l2_TL[step, self._pick(layers)] *= factor
        return self

    def no_gradient(self, layer: Layers, *, zero: bool = False) -> Self:
        """Make the gradient of a layer None, or exactly zero, at every step. Its weights stay as they are."""
        i = self._pick(layer)
        # nan stands for a gradient of None
        self.grad_l2_TL[:, i] = 0.0 if zero else np.nan
        self.zero_frac_TL[:, i] = 1.0 if zero else np.nan
        self.nonfinite_TL[:, i] = 0.0 if zero else np.nan
        self.weight_l2_TL[:, i] = self.weight_l2_TL[0, i]
        return self

    def imbalance(self, layer: Layers, *, factor: float = 1000.0) -> Self:
        """Multiply the gradient and the update of a layer at every step by a factor."""
        i = self._pick(layer)
        self.grad_l2_TL[:, i] *= factor
        # the update of SGD follows from the gradient, and has the factor already
        self.update_factor_TL[:, i] *= factor if self.info.optimizer != "SGD" else 1.0
        return self

    def non_finite(
        self, *, step: int = 150, layers: Layers = None, value: float = np.nan, count: int = 1, lasting: bool = False
    ) -> Self:
        """Put nan or inf into gradients at one step. If `lasting`, put it into all later gradients and losses."""
        at = slice(step, None) if lasting else slice(step, step + 1)
        for i in self._pick(layers):
            self.grad_l2_TL[at, i] = value
            self.nonfinite_TL[at, i] = count
        if lasting:
            self.loss_T[step:] = value
        return self

    def dead_relu(self, act: int, *, fraction: float = 0.95, onset: int = 100) -> Self:
        """Silence a fraction of the units of a ReLU from `onset`, which shrinks mean and standard deviation."""
        self.dead_frac_TA[onset:, act] = fraction
        self.act_mean_TA[onset:, act] *= 1 - fraction
        self.act_std_TA[onset:, act] *= np.sqrt(1 - fraction)
        self.silent_TA[onset:, act] = np.floor(fraction * self.width)
        self.silent_since_TA[onset:, act] = onset
        return self

    def saturated(self, act: int, *, fraction: float = 0.95, onset: int = 100, module_type: str = "Sigmoid") -> Self:
        """Saturate a fraction of the outputs of a module, and change its type to `module_type`."""
        self.saturated_frac_TA[onset:, act] = fraction
        acts = list(self.info.activations)
        acts[act] = replace(acts[act], module_type=module_type)
        self.info = replace(self.info, activations=tuple(acts))
        return self

    def attention(self, act: int, *, logit: float, entropy: float, onset: int = 100) -> Self:
        """Make a module attention, with usual logits before `onset` and the given ones from then on."""
        for name in ("dead_frac", "saturated_frac", "act_mean", "act_std"):  # attention in one kernel has no output
            getattr(self, f"{name}_TA")[:, act] = np.nan
        is_later_T = self.t_T >= onset
        self.max_logit_TA[:, act] = np.where(is_later_T, logit, 5.0)
        self.attention_entropy_TA[:, act] = np.where(is_later_T, entropy, 0.9)
        acts = list(self.info.activations)
        acts[act] = replace(acts[act], module_type="Attention")
        self.info = replace(self.info, activations=tuple(acts))
        return self

    def routed(self, act: int, *, unused: int, tokens: float, onset: int = 100, end: int | None = None) -> Self:
        """Make a module the choice of the router `gate`. From `onset` to `end`, some of its experts get no token.

        Args:
            act: Index of the module, which has `width` experts.
            unused: Number of experts without tokens; the others share them equally.
            tokens: Tokens per expert in a sampled batch.
            onset: First step of that state.
            end: First step after it.
        """
        self.dead_frac_TA[:, act], self.act_mean_TA[:, act], self.act_std_TA[:, act] = 0.0, tokens, 0.1 * tokens
        self.saturated_frac_TA[:, act] = np.nan
        self.dead_frac_TA[onset:end, act] = unused / self.width
        # equal shares of the rest: the mean square of the tokens is this multiple of their squared mean
        self.act_std_TA[onset:end, act] = tokens * np.sqrt(self.width / (self.width - unused) - 1)
        self.silent_TA[onset:end, act] = unused
        self.silent_since_TA[onset:end, act] = onset if unused else np.nan
        acts = list(self.info.activations)
        acts[act] = replace(acts[act], name="gate.routing", module_type="Routing")
        self.info = replace(self.info, activations=tuple(acts))
        return self

    def policy_gradient(self, *, divergence: float, clipped: float, entropy: float = 0.9, onset: int = 100) -> Self:
        """Make the loss a policy gradient, with usual statistics before `onset` and the given ones from then on."""
        is_sampled_T, is_later_T = self.t_T % dynamics.SAMPLE_EVERY == 0, self.t_T >= onset
        usual = {"entropy": (entropy, 0.9), "divergence": (divergence, 0.02), "clipped_frac": (clipped, 0.1)}
        for name, (later, before) in usual.items():
            self.policy[f"policy.{name}"] = np.where(is_sampled_T, np.where(is_later_T, later, before), np.nan)
        return self

    def loss_scale_skips(self, steps: Sequence[int] = (0, 1, 2)) -> Self:
        """Let scaled fp16 gradients overflow at some steps. These steps are skipped and halve the scale."""
        self.info = replace(self.info, precision="fp16", loss_scaling=True)
        at = list(steps)
        self.skipped_T[at] = 1.0
        self.grad_l2_TL[at], self.nonfinite_TL[at] = np.inf, self.numel // 10
        # without the step itself: a scaler halves the scale after the step that overflows
        halvings_T = np.cumsum(self.skipped_T) - self.skipped_T
        self.loss_scale_T[:] = dynamics.INITIAL_SCALE * 0.5**halvings_T
        return self

    def sparse_embedding(self, layer: int = 0, *, zero_frac: float = 0.97) -> Self:
        """Make a layer an embedding with few used rows per batch, so that most of its gradient is zero."""
        self._change(layer, module_type="Embedding")
        unused_T = zero_frac + 0.2 * (1 - zero_frac) * self.rng.standard_normal(self.steps)
        self.zero_frac_TL[:, layer] = np.clip(unused_T, 0, 1)
        return self

    def own_rate(self, layer: int, *, factor: float) -> Self:
        """Put a layer into a new parameter group with `factor` times the learning rate."""
        self.rates.append(factor)
        self._change(layer % self.layers, group=len(self.rates))
        self.update_factor_TL[:, layer] *= factor
        return self
