"""Histogram counts are exact, in fixed bins."""

import numpy as np
import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwatch.probe.device import backend as kernels
from gradwatch.probe.device import sync
from gradwatch.probe.gradients import histograms
from gradwatch.probe.gradients.histograms import NUM_BINS, HistogramProbe, bin_edges
from gradwatch.probe.gradients.statistics import GradientProbe

every_kernel = pytest.mark.parametrize(
    "kernel",
    [
        pytest.param(
            "native", marks=pytest.mark.skipif(kernels.select_backend() is None, reason="the extension is not built")
        ),
        "torch",
    ],
)


def parameter_with(grad):
    param = torch.nn.Parameter(torch.zeros(grad.shape, dtype=grad.dtype))
    param.grad = grad
    return param


def count(grad, kernel):
    return sync.to_host(HistogramProbe([parameter_with(grad)], kernel=kernel).read())[0, 0]


def count_while_reading(params, kernel):
    """Return the statistics of gradients, and the histograms that were made in the same read."""
    counts_LB = histograms.empty(params)
    row_SL = GradientProbe(params, kernel=kernel).read(counts_KB=counts_LB)
    return sync.to_host(row_SL), sync.to_host(counts_LB)


def test_edges_ascend_and_mirror_each_other():
    edges = bin_edges()

    assert len(edges) == NUM_BINS + 1, "one edge more than bins"
    assert (np.diff(edges) > 0).all(), "ascending"
    np.testing.assert_array_equal(edges, -edges[::-1], "the same on both sides of zero")


@every_kernel
@settings(max_examples=200)
@given(
    seed=st.integers(0, 2**32 - 1),
    length=st.sampled_from([0, 1, 5, 16, 17, 1008, 1023, 1025, 3000]),
    decades=st.integers(-14, 8),
    zeros=st.sampled_from([0.0, 0.0, 0.7, 1.0]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    specials=st.lists(st.sampled_from([0.0, -0.0, np.nan, np.inf, -np.inf, 1e-45, 3e38, -1e30, 0.25]), max_size=3),
)
def test_counts_equal_the_obvious_ones(kernel, seed, length, decades, zeros, dtype, specials):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=length) * 10.0**decades
    x[rng.random(length) < zeros] = 0.0
    for special in specials:
        x[rng.random(length) < 0.1] = special
    grad = torch.from_numpy(x).to(dtype)

    expected_B = reference.histogram(grad, bin_edges())
    row_SL, counted_LB = count_while_reading([parameter_with(grad)], kernel)
    np.testing.assert_array_equal(count(grad, kernel), expected_B)
    np.testing.assert_array_equal(counted_LB[0], expected_B, "counted in the read of the statistics")
    np.testing.assert_array_equal(
        row_SL, GradientProbe([parameter_with(grad)], kernel=kernel).read(), "counting changes no statistic"
    )


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


@every_kernel
def test_one_read_counts_what_is_there_of_every_layout(kernel):
    generator = torch.Generator().manual_seed(5)
    grads = [
        torch.randn(70, 90, generator=generator)[:, ::3],
        torch.eye(9).to_sparse(),
        torch.randn(40, dtype=torch.complex64, generator=generator),
        torch.randn(2, 3, 4, 5, generator=generator).to(memory_format=torch.channels_last),
        torch.empty(0, 7),
    ]
    params = [torch.nn.Parameter(torch.zeros(g.shape, dtype=g.dtype)) for g in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    params.append(torch.nn.Parameter(torch.ones(4)))

    _, counts_LB = count_while_reading(params, kernel)

    all_2LB = HistogramProbe(params, kernel=kernel).read().numpy()
    np.testing.assert_array_equal(counts_LB, all_2LB[0])
    for first, last in ((0, 2), (1, 4), (5, 6), (3, 3)):
        some_KB = histograms.empty(params[first:last])
        row_SL = GradientProbe(params, kernel=kernel).read(counts_KB=some_KB, first=first)
        np.testing.assert_array_equal(some_KB, all_2LB[0, first:last], "those whose turn it is")
        np.testing.assert_array_equal(row_SL, GradientProbe(params, kernel=kernel).read(), "statistics of all")
        some_2KB = HistogramProbe(params, kernel=kernel).read(slice(first, last))
        np.testing.assert_array_equal(some_2KB, all_2LB[:, first:last])
    assert counts_LB.sum(axis=1).tolist() == [*(g.numel() for g in grads), 0], "every value once, a missing one never"


@pytest.mark.skipif(kernels.select_backend() is None, reason="the extension is not built")
def test_any_number_of_threads_counts_and_measures_alike(monkeypatch):
    generator = torch.Generator().manual_seed(6)
    params = [torch.nn.Parameter(torch.randn(n, generator=generator)) for n in (70_001, 3, 200_000, 0, 60_000)]
    for param in params:  # more bytes than are left to one thread
        param.grad = torch.randn(param.shape, generator=generator)
    answers = []
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        counts_2LB = HistogramProbe(params, kernel="native").read()
        answers.append((*count_while_reading(params, "native"), counts_2LB.numpy()))

    for one, three in zip(*answers, strict=True):
        np.testing.assert_array_equal(one, three)
    assert answers[1][2].sum(axis=2).tolist() == [[p.numel() for p in params]] * 2


@pytest.mark.skipif(kernels.select_backend() is None, reason="the extension is not built")
def test_the_extension_refuses_room_for_histograms_that_is_too_small():
    native = kernels.select_backend()
    tensors = (torch.ones(3), torch.ones(3))
    too_small_KB = torch.zeros(2 * NUM_BINS - 1, dtype=torch.int64)

    with pytest.raises(ValueError, match="large enough"):
        native.statistics(tensors, False, torch.empty(12), 1.0, too_small_KB, 0, 2, 1)
