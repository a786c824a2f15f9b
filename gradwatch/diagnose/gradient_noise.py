"""Estimate the gradient noise scale, the batch size at which noise equals signal, from two batch sizes."""

# T = sampled steps

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import numpy as np

from gradwatch.events import RANK_NOISE
from gradwatch.history.store import History

MIN_SAMPLED_STEPS = 8
"""Minimum number of sampled steps for an estimate: each step gives a difference of two noisy squares."""

MAX_RANK_STEPS = 8
"""Maximum number of readings of the ranks, the newest first: of 20 readings, the oldest are from the first 5 steps."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseScale:
    """The gradient noise scale.

    Args:
        samples: The scale, in samples if the loop passes its batches, else in micro-batches or batches of a rank.
            In batches far below the scale, noise dominates: twice the batch then allows nearly twice the rate. Batches
            far above it cost more than they gain. inf if the noise hides the signal.
        batch: Size of a step's batch, in the same unit.
        steps: Number of sampled steps in the average.
    """

    samples: float
    batch: float
    steps: int

    @property
    def is_noisy(self) -> bool:
        """Whether the noise of a step's gradient has 10 times the power of its signal."""
        return self.samples > 10 * self.batch


def noise_scale(history: History) -> NoiseScale | None:
    """Estimate the gradient noise scale over the newest steps, or return None if there are too few measurements.

    The batches of two sizes are a micro-batch and its step, or the batch of a rank and the batch of all ranks.

    With b samples in a small batch and k small batches in a big one, E|g_b|^2 = |G|^2 + S / b and E|g_kb|^2 = |G|^2 + S
    / (k b). That gives the signal |G|^2 and the noise S of one sample; the scale is S / |G|^2. Both are averaged before
    the division. McCandlish et al. 2018, https://arxiv.org/abs/1812.06162, app. A.1.
    """
    batch_T = history.scalar("samples_per_s") * history.scalar("step_ms") / 1e3
    batch = float(np.median(batch_T[np.isfinite(batch_T)])) if np.isfinite(batch_T).any() else math.nan
    if history.info.accumulate > 1:
        count = history.info.accumulate
        small_T, big_T = history.scalar("grad_norm.micro") ** 2, history.scalar("grad_norm.before_clip") ** 2
    else:  # the ranks read some gradients, at their first steps and at powers of two
        events = [event.values for event in history.events if event.kind == RANK_NOISE.name][-MAX_RANK_STEPS:]
        count = int(events[-1]["ranks"]) if events else 1
        small_T, big_T = (np.array([values[name] for values in events]) for name in ("local", "average"))
        batch *= count  # `samples_per_s` counts the samples of rank 0 only
    known_T = np.isfinite(small_T) & np.isfinite(big_T)
    if count < 2 or np.count_nonzero(known_T) < MIN_SAMPLED_STEPS:
        return None
    small, big = float(small_T[known_T].mean()), float(big_T[known_T].mean())
    signal, noise = (count * big - small) / (count - 1), (small - big) / (1 - 1 / count)  # of one small batch
    batch = float(count) if math.isnan(batch) else batch
    scale = max(noise, 0.0) / signal * batch / count if signal > 0 else math.inf  # the estimates may be negative
    return NoiseScale(samples=scale, batch=batch, steps=int(np.count_nonzero(known_T)))
