"""Hold the tolerances and thresholds by which a map is judged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """Tolerances and thresholds of the verdict on a map.

    Args:
        gap: Completeness gap at which integrated gradients are complete, over the sum of their magnitudes.
        min_steps: Steps of the integral at first; they are doubled until the gap is small enough.
        max_steps: Steps at which the doubling ends.
        activity: Sum of the magnitudes of a map below which it is saturated, over the largest sum that integrated
            gradients have from any baseline.
        agreement: Mean rank correlation with the maps from other baselines below which the baseline decides the map.
            At 0.5, a quarter of the variance of the ranks is shared.
        stability: Rank correlation of the maps with and without noise, below which a map is unstable.
        noise_frac: Standard deviation of the noise, as a fraction of the range of the sample.
        noisy_maps: Maps with noise.
        interaction: Largest interaction of two features, over the largest effect of removing two, above which single
            numbers cannot express the score. A product of two features has 1.
        top_features: Features whose interactions are measured, in pairs.
        random_orders: Random orders of removal.
        removal_steps: Steps in which the features are removed.
        better_orders: Share of the random orders that may remove the score faster than the map.
        spread: Standard deviation of the random orders, over the largest effect, below which the order is irrelevant.
        min_features: Minimum number of features for a deletion test: 4 features have 24 orders, so that one order is
            less than 5 % of them.
        deviations: Standard errors between a measured number and its threshold that decide a verdict.
        min_noise_samples: Samples of SmoothGrad at first; they are doubled until the standard error is small enough.
        max_noise_samples: Samples of SmoothGrad at which the doubling ends.
        smoothgrad_error: Mean standard error of SmoothGrad over its mean magnitude that is small enough.
    """

    gap: float = 0.01
    min_steps: int = 16
    max_steps: int = 1024
    activity: float = 0.05
    agreement: float = 0.5
    stability: float = 0.5
    noise_frac: float = 0.05
    noisy_maps: int = 8
    interaction: float = 0.5
    top_features: int = 6
    random_orders: int = 32
    removal_steps: int = 16
    better_orders: float = 0.05
    spread: float = 1e-4
    min_features: int = 4
    deviations: float = 2.0
    min_noise_samples: int = 16
    max_noise_samples: int = 256
    smoothgrad_error: float = 0.1
