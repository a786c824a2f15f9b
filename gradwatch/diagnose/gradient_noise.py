"""How noisy gradients are: the batch size at which noise and signal are equal, from two sizes of batch."""

# T = sampled steps

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import numpy as np

from gradwatch.history.store import History

MIN_SAMPLED_STEPS = 8
"""Sampled steps below which nothing is said: each of them gives a difference of two noisy squares."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseScale:
    """The gradient noise scale.

    Args:
        samples: The scale, in samples where the loop hands over its batches, else in micro-batches. Batches far below
            it average little of their noise away: twice the batch then allows nearly twice the rate. Batches far above
            it cost more than they give. inf where no signal stands out of the noise.
        batch: Size of a step's batch, in the same unit.
        steps: Sampled steps that it is an average of.
    """

    samples: float
    batch: float
    steps: int

    @property
    def is_noisy(self) -> bool:
        """Whether the noise of a step's gradient has ten times the power of its signal."""
        return self.samples > 10 * self.batch


def noise_scale(history: History) -> NoiseScale | None:
    """Estimate the gradient noise scale over the newest steps, or return None where too little was measured.

    With b samples in a micro-batch and k of them in a step, E|g_b|^2 = |G|^2 + S / b and E|g_kb|^2 = |G|^2 + S / (k b).
    That gives the signal |G|^2 and the noise S of one sample; the scale is S / |G|^2. Both are averaged before they are
    divided. McCandlish et al. 2018, https://arxiv.org/abs/1812.06162, app. A.1.
    """
    count = history.info.accumulate
    small_T, big_T = history.scalar("grad_norm.micro") ** 2, history.scalar("grad_norm.before_clip") ** 2
    known_T = np.isfinite(small_T) & np.isfinite(big_T)
    if count < 2 or np.count_nonzero(known_T) < MIN_SAMPLED_STEPS:
        return None
    small, big = float(small_T[known_T].mean()), float(big_T[known_T].mean())
    signal, noise = (count * big - small) / (count - 1), (small - big) / (1 - 1 / count)  # of one micro-batch
    batch_T = history.scalar("samples_per_s") * history.scalar("step_ms") / 1e3
    batch = float(np.median(batch_T[np.isfinite(batch_T)])) if np.isfinite(batch_T).any() else float(count)
    scale = max(noise, 0.0) / signal * batch / count if signal > 0 else math.inf
    return NoiseScale(samples=scale, batch=batch, steps=int(np.count_nonzero(known_T)))
