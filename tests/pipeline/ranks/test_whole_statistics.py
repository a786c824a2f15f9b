"""Statistics of whole parameters follow from the statistics of their parts."""

import numpy as np
import pytest
import reference
import torch

from gradwatch import catalogue
from gradwatch.pipeline.ranks.whole_statistics import join_shard
from gradwatch.records import RunInfo, ShardInfo

WHOLES = [torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) for shape in [(5, 3), (7,), (4, 2)]]
NUM_PARAM = len(catalogue.PARAM)
RATIO = catalogue.PARAM_NAMES.index("update.ratio")
RATE = 0.1


def poisoned(value):
    grad = WHOLES[0].clone()
    grad[4, 1] = value
    return grad


def statistics_of(weight, grad):
    """The statistics of a tensor, or of a part of it, that SGD moves."""
    row_S = np.full(NUM_PARAM, np.nan)
    if grad is not None:
        row_S[:6] = reference.gradient_statistics(grad)
        row_S[6] = float(weight.norm())
        if weight.any():
            row_S[7] = float((RATE * grad).norm() / weight.norm())
    return row_S


def join(parts, *, is_split=True):
    """Join pairs of a weight and its gradient, one of each rank."""
    with np.errstate(all="ignore"):
        of_ranks = {rank: statistics_of(*part)[:, None] for rank, part in enumerate(parts)}
    numels = [part[0].numel() for part in parts]
    shards = [ShardInfo(ranks=(*of_ranks,), layers=(0,), numels=(n,), is_split=is_split) for n in numels]
    infos = {rank: RunInfo(name="", created="", layers=(), shards=(shard,)) for rank, shard in enumerate(shards)}
    return join_shard(shards[0], of_ranks, infos)[:, 0]


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
@pytest.mark.parametrize(
    "grad", [*WHOLES, torch.zeros(6), poisoned(torch.inf), poisoned(torch.nan)], ids=lambda g: f"{g.sum():.3g}"
)
def test_parts_of_any_size_give_the_statistics_of_the_whole(grad, num_ranks):
    weight = torch.ones_like(grad) + 0.5 * grad.nan_to_num(0.0, 0.0).sign()
    # some ranks have no row of the tensor
    parts = list(zip(torch.tensor_split(weight, num_ranks), torch.tensor_split(grad, num_ranks), strict=True))

    with np.errstate(all="ignore"):
        expected_S = statistics_of(weight, grad)
    if not np.isfinite(expected_S[RATIO]):
        expected_S[RATIO] = np.nan
    np.testing.assert_allclose(join(parts), expected_S, rtol=1e-6, atol=1e-12)


def test_a_gradient_that_no_rank_has_is_missing_and_not_zero():
    assert np.isnan(join([(torch.ones(2), None), (torch.ones(2), None)])).all()


def test_a_rank_without_a_gradient_adds_nothing_to_that_of_another():
    grad = torch.tensor([3.0, 4.0])

    joined_S = join([(torch.ones(2), None), (torch.ones(2), grad)])

    np.testing.assert_allclose(joined_S[:6], reference.gradient_statistics(grad), rtol=1e-6)
    assert np.isnan(joined_S[6:]).all()  # one rank has not measured its weight


def test_a_part_of_zeros_leaves_the_ratio_of_the_whole_weight():
    weight, grad = torch.tensor([3.0, 4.0]), torch.tensor([1.0, 0.0])

    joined_S = join([(weight, grad), (torch.zeros(2), torch.zeros(2))])

    assert joined_S[RATIO] == pytest.approx(RATE * 1.0 / 5.0)


def test_copies_count_once_and_terms_of_a_sum_as_shards():
    weight, grad, other = torch.ones(2), torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])

    copies_S = join([(weight, grad), (weight, grad)], is_split=False)
    terms_S = join([(weight, grad), (weight, other)], is_split=False)

    np.testing.assert_allclose(copies_S, statistics_of(weight, grad), rtol=1e-6)
    assert terms_S[0] == pytest.approx(float((grad + other).norm()))  # orthogonal terms
    assert terms_S[6] == copies_S[6]
