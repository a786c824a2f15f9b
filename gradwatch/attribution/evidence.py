"""Measure what a map claims: its sum, other baselines, small noise, removal of its features, and their pairs."""

# B = samples of a batch, F = features, O = random orders, R = steps of removal

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from gradwatch.attribution.methods import Map, Mapper, noise_of, relative_gap
from gradwatch.attribution.score import Score
from gradwatch.attribution.thresholds import Thresholds


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean with its standard error."""

    mean: float
    standard_error: float


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Deletion:
    """Effect of removing features in the order of the map, against random orders.

    Args:
        area: Mean effect over all steps of removal, more than in random orders, over the largest effect.
        standard_error: Standard error of the area, from the random orders.
        better_orders: Share of the random orders with a larger effect than the map.
        spread: Standard deviation over the random orders, over the largest effect.
    """

    area: float
    standard_error: float
    better_orders: float
    spread: float


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The measurements of the experiments with a map.

    Args:
        score: Score of the sample.
        baseline_scores: Score of each baseline; the map is measured from the first.
        gap: Difference between the sum of the map and the change of the score, over the sum of the magnitudes; nan for
            Grad-CAM.
        steps: Steps of integrated gradients from each baseline.
        activity: Sum of the map's magnitudes, over the largest one of integrated gradients from any baseline; nan for
            Grad-CAM.
        sizes: Sum of the magnitudes of integrated gradients from each baseline.
        agreement: Rank correlation of the map with integrated gradients from each baseline, without itself.
        stability: Rank correlation of the maps with and without small noise.
        deletion: Effect of removing the features in order; None with too few features, or if all are equal.
        interaction: Largest interaction of two top features, over the largest effect of removing two.
    """

    score: float
    baseline_scores: Mapping[str, float]
    gap: float
    steps: Mapping[str, int]
    activity: float
    sizes: Mapping[str, float]
    agreement: Mapping[str, float]
    stability: Estimate
    deletion: Deletion | None
    interaction: float

    @property
    def mean_agreement(self) -> float:
        """Return the mean rank correlation over the baselines; nan if no map has ranks."""
        known = [value for value in self.agreement.values() if math.isfinite(value)]
        return sum(known) / len(known) if known else math.nan


def measure(score: Score, mapper: Mapper, found: Map, bases: Mapping[str, Tensor], limits: Thresholds) -> Evidence:
    """Measure the evidence of a map.

    Args:
        score: The score, with its sample.
        mapper: Computes maps by the same method.
        found: The map, from the first baseline.
        bases: Baselines by name.
        limits: Tolerances and sizes of the experiments.
    """
    first = next(iter(bases))
    baseline = bases[first]
    integrated = {name: mapper.integrated(score.point, base) for name, base in bases.items()}
    sizes = {name: float(one.values.double().abs().sum()) for name, one in integrated.items()}
    given, largest = found.contributions, max(sizes.values())
    claimed = score.totals(found.values if given is None else given)
    others = [name for name in bases if mapper.method != "integrated" or name != first]
    return Evidence(
        score=float(score.values(score.point)),
        baseline_scores={name: float(score.values(base)) for name, base in bases.items()},
        gap=math.nan if given is None else relative_gap(score, given, score.point, baseline),
        steps={name: one.evaluations for name, one in integrated.items()},
        activity=math.nan if given is None or not largest else float(given.double().abs().sum()) / largest,
        sizes=sizes,
        agreement={name: rank_correlation(claimed, score.totals(integrated[name].values)) for name in others},
        stability=_stability(score, mapper, found, baseline, limits),
        deletion=_deletion(score, score.totals(found.values), baseline, limits, is_signed=mapper.is_signed),
        interaction=_interaction(score, claimed, baseline, limits),
    )


def rank_correlation(first_F: Tensor, second_F: Tensor) -> float:
    """Return Spearman's rank correlation; nan if the values of one map are all equal."""
    ranks = torch.stack([_ranks(first_F), _ranks(second_F)])
    centered = ranks - ranks.mean(1, keepdim=True)
    norms = centered.norm(dim=1)
    return float((centered[0] * centered[1]).sum() / norms.prod()) if bool((norms > 0).all()) else math.nan


def _ranks(values_F: Tensor) -> Tensor:
    """Return the rank of each value; equal values share their mean rank."""
    _, place_F, counts = values_F.unique(return_inverse=True, return_counts=True)
    mean_ranks: Tensor = counts.cumsum(0).double() - (counts - 1) / 2
    return mean_ranks[place_F]


def _stability(score: Score, mapper: Mapper, found: Map, baseline: Tensor, limits: Thresholds) -> Estimate:
    deviation, plain = noise_of(score.point, limits), score.totals(found.values)
    noise = torch.Generator(score.point.device).manual_seed(0)  # SmoothGrad seeds the global generator
    values = []
    for _ in range(limits.noisy_maps):
        shift = torch.randn(score.point.shape, generator=noise, device=score.point.device, dtype=score.point.dtype)
        noisy = mapper(score.point + deviation * shift, baseline)
        values.append(rank_correlation(plain, score.totals(noisy.values)))
    correlations = torch.tensor(values, dtype=torch.float64)
    error = float(correlations.std()) / math.sqrt(len(values))
    return Estimate(mean=float(correlations.mean()), standard_error=error)


def _deletion(
    score: Score, totals_F: Tensor, baseline: Tensor, limits: Thresholds, *, is_signed: bool
) -> Deletion | None:
    features = len(totals_F)
    if features < limits.min_features or bool((totals_F == totals_F[0]).all()):
        return None
    device = totals_F.device
    removed_R = torch.linspace(0, features, limits.removal_steps + 1, device=device).round().unique()[1:]
    full = score.values(score.point)

    def effects(order_F: Tensor) -> Tensor:
        """Return the effect of removing the first features of an order, shape (R,)."""
        masks_RF = order_F.argsort()[None] < removed_R[:, None]
        drop_R: Tensor = full - score.values(score.without(masks_RF, baseline))
        return drop_R if is_signed else drop_R.abs()

    ordered_R = effects(totals_F.argsort(descending=True, stable=True))
    random_OR = torch.stack([effects(torch.randperm(features, device=device)) for _ in range(limits.random_orders)])
    scale = max(float(ordered_R.abs().max()), float(random_OR.abs().max()))
    if not scale:
        return Deletion(area=0.0, standard_error=0.0, better_orders=0.0, spread=0.0)
    area, areas_O = ordered_R.mean() / scale, random_OR.mean(1) / scale
    return Deletion(
        area=float(area - areas_O.mean()),
        standard_error=float(areas_O.std()) / math.sqrt(limits.random_orders),
        # orders whose difference is rounding are as good as the map
        better_orders=float((areas_O > area + 1e-6).double().mean()),
        spread=float(areas_O.std()),
    )


def _interaction(score: Score, claimed_F: Tensor, baseline: Tensor, limits: Thresholds) -> float:
    """Return the largest interaction of two top features: how much the effect of both differs from the sum of two."""
    top = claimed_F.abs().argsort(descending=True, stable=True)[: limits.top_features].tolist()
    pairs = list(itertools.combinations(top, 2))
    if not pairs:
        return 0.0
    removals = [(feature,) for feature in top] + pairs
    masks_BF = torch.zeros(len(removals), len(claimed_F), dtype=torch.bool, device=claimed_F.device)
    for row, features in enumerate(removals):
        masks_BF[row, list(features)] = True
    full = score.values(score.point)
    drops: list[float] = (full - score.values(score.without(masks_BF, baseline))).tolist()
    effect = dict(zip(removals, drops, strict=True))
    largest = max(abs(drop) for drop in drops)
    # effects below the rounding of the score have no ratio
    if largest <= 1e-5 * max(1.0, abs(float(full))):
        return 0.0
    return max(abs(effect[one, two] - effect[one,] - effect[two,]) for one, two in pairs) / largest
