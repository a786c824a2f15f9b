"""Compute the statistics of whole parameters from the statistics of the parts that several ranks hold."""

# R = ranks, C = parameters that these ranks share, L = parameters, S = statistics

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from gradwatch import catalogue
from gradwatch.history.store import Floats
from gradwatch.pipeline.ranks.states import TOLERANCE
from gradwatch.records import RunInfo, ShardInfo

L2, ABSMAX, MEAN, STD, ZERO_FRAC, NONFINITE, WEIGHT, RATIO = range(len(catalogue.PARAM))


def join_shard(shard: ShardInfo, parts: Mapping[int, Floats], infos: Mapping[int, RunInfo]) -> Floats:
    """Return the statistics of the parameters that a set of ranks holds together.

    If each rank has one term of a sum, the terms of the gradient count as shards. Its norm is then exact only for
    orthogonal terms.

    Args:
        shard: The set of ranks.
        parts: The statistics of each of these ranks, of shape (S, L).
        infos: The description of each of these ranks.

    Returns:
        Statistics of shape (S, C).
    """
    part_RSC = np.stack([parts[rank][:, list(shard.layers)] for rank in shard.ranks]).astype(np.float64)
    if not shard.is_split:
        own_SC: Floats = part_RSC[0]
        with np.errstate(all="ignore"):
            is_equal_C = ~(np.ptp(part_RSC[:, L2], axis=0) > TOLERANCE * part_RSC[:, L2].max(0))
        whole_SC = np.concatenate([_gradients(part_RSC, _numels(shard, infos)), own_SC[WEIGHT:]])
        return np.asarray(np.where(is_equal_C, own_SC, whole_SC))
    return np.concatenate([_gradients(part_RSC, _numels(shard, infos)), _weights(part_RSC)])


def _numels(shard: ShardInfo, infos: Mapping[int, RunInfo]) -> NDArray[np.int64]:
    """Return the number of elements of each part, of shape (R, C)."""
    numels = []
    for rank in shard.ranks:
        of_rank = {layer: numel for s in infos[rank].shards for layer, numel in zip(s.layers, s.numels, strict=True)}
        numels.append([of_rank.get(layer, 0) for layer in shard.layers])
    return np.array(numels, np.int64)


def _gradients(part_RSC: Floats, numel_RC: NDArray[np.int64]) -> Floats:
    """Return the statistics of whole gradients; nan for a gradient that no rank has."""
    has_RC = ~np.isnan(part_RSC[:, NONFINITE])  # of a missing gradient, every statistic is nan
    n_RC = np.where(has_RC, numel_RC, 0)

    def total(values_RC: Floats, among_RC: NDArray[np.bool_] = has_RC) -> Floats:
        return np.asarray(np.where(among_RC, values_RC, 0.0).sum(0))

    with np.errstate(all="ignore"):
        mean_RC, std_RC, zero_RC = part_RSC[:, MEAN], part_RSC[:, STD], part_RSC[:, ZERO_FRAC]
        n_C = n_RC.sum(0)
        mean_C = total(mean_RC * n_RC, n_RC > 0) / n_C
        square_C = total((np.square(std_RC) + np.square(mean_RC)) * n_RC, n_RC > 0) / n_C
        whole_SC = np.stack(
            [
                np.sqrt(total(np.square(part_RSC[:, L2]))),
                np.where(has_RC, part_RSC[:, ABSMAX], 0.0).max(0),  # NaN if any part has NaN
                mean_C,
                np.sqrt(np.maximum(square_C - np.square(mean_C), 0.0)),
                total(zero_RC * n_RC, n_RC > 0) / n_C,
                total(part_RSC[:, NONFINITE]),
            ]
        )
    return np.where(has_RC.any(0), whole_SC, np.nan)


def _weights(part_RSC: Floats) -> Floats:
    """Return weight norms and update ratios; nan if any rank has not measured them."""
    weight_RC, ratio_RC = part_RSC[:, WEIGHT], part_RSC[:, RATIO]
    with np.errstate(all="ignore"):
        weight_C = np.sqrt(np.square(weight_RC).sum(0))
        # a part of zeros has no ratio; nor has an empty one
        update_RC = np.where(weight_RC == 0, 0.0, ratio_RC * weight_RC)
        ratio_C = np.sqrt(np.square(update_RC).sum(0)) / weight_C
    return np.stack([weight_C, np.where(np.isfinite(ratio_C), ratio_C, np.nan)])
