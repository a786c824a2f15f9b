"""Histogram counts are exact, in fixed bins."""

import numpy as np
import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwatch.probe import kernel as kernels
from gradwatch.probe import transfer
from gradwatch.probe.histograms import NUM_BINS, HistogramProbe, bin_edges

every_kernel = pytest.mark.parametrize(
    "kernel",
    [
        pytest.param("native", marks=pytest.mark.skipif(kernels.choose() is None, reason="the extension is not built")),
        "torch",
    ],
)


def count(grad, kernel):
    param = torch.nn.Parameter(torch.zeros(grad.shape, dtype=grad.dtype))
    param.grad = grad
    return transfer.to_host(HistogramProbe([param], kernel=kernel).read())[0, 0]


def test_edges_ascend_and_mirror_each_other():
    edges = bin_edges()

    assert len(edges) == NUM_BINS + 1, "one edge more than bins"
    assert (np.diff(edges) > 0).all(), "ascending"
    np.testing.assert_array_equal(edges, -edges[::-1], "the same on both sides of zero")


@every_kernel
@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    length=st.sampled_from([0, 1, 5, 16, 1023, 1025, 3000]),
    decades=st.integers(-14, 8),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    specials=st.lists(st.sampled_from([0.0, -0.0, np.nan, np.inf, -np.inf, 1e-45, 3e38, -1e30, 0.25]), max_size=3),
)
def test_counts_equal_the_obvious_ones(kernel, seed, length, decades, dtype, specials):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=length) * 10.0**decades
    for special in specials:
        x[rng.random(length) < 0.1] = special
    grad = torch.from_numpy(x).to(dtype)

    np.testing.assert_array_equal(count(grad, kernel), reference.histogram(grad, bin_edges()))


@every_kernel
def test_values_on_an_edge_count_farther_from_zero(kernel):
    counts = count(torch.tensor([1.0, -1.0, 1.25]), kernel)

    edges = bin_edges()
    assert edges[np.flatnonzero(counts)].tolist() == [-1.25, 1.0, 1.25], "lower edges of the bins that hold them"


@every_kernel
def test_gradients_come_before_weights_and_a_missing_one_counts_nothing(kernel):
    params = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(5))]
    params[1].grad = torch.zeros(5).to_sparse()

    counts_2LB = HistogramProbe(params, kernel=kernel).read()

    assert counts_2LB.shape == (2, 2, NUM_BINS), "gradients and weights of each parameter"
    assert counts_2LB.sum(dim=2).tolist() == [[0, 5], [3, 5]], "every value once"
    assert int(counts_2LB[0, 1, NUM_BINS // 2]) == 5, "zeros that a sparse gradient does not store"
