"""Tests of the Triton kernels, which test_triton.py runs in Triton's interpreter, chosen before the import."""

import math

import numpy as np
import pytest
import reference
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from gradwatch.probe.batches import batch_hash
from gradwatch.probe.device import triton_reduce
from gradwatch.probe.device.triton_kernels import CHUNK
from gradwatch.probe.gradients import histograms

SPECIALS = [0.0, -0.0, np.nan, np.inf, -np.inf, 1e-45, -1e-40, 1e-30, 3e38, -1e30, 1.0]
NO_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)  # which takes minutes in the interpreter
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@st.composite
def gradients(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    length = draw(st.one_of(st.integers(0, 40), st.sampled_from([CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5])))
    offset = draw(st.sampled_from([0.0, 0.0, 1.0, -30.0, 1000.0]))
    x = (rng.normal(size=length) + offset) * 10.0 ** draw(st.integers(-44, 30))
    for special in draw(st.lists(st.sampled_from(SPECIALS), max_size=3)):
        x[rng.random(length) < draw(st.sampled_from([0.001, 0.3]))] = special
    return torch.from_numpy(x).to(draw(st.sampled_from(DTYPES)))


def assert_right(row_S, values):
    expected_S = reference.gradient_statistics(values)
    with np.errstate(over="ignore"):
        expected_S[:4] = expected_S[:4].astype(np.float32)
    absmax = expected_S[1] if np.isfinite(expected_S[1]) else 0.0
    tolerance_S = np.array([1e-45, 0, 2e-6 * absmax + 1e-45, 5e-7 * absmax + 1e-45, 0, 0])
    relative_S = np.array([1e-5, 0, 1e-5, 1e-5, 1e-7, 0])
    for i, name in enumerate(["l2", "absmax", "mean", "std", "zero_frac", "nonfinite"]):
        np.testing.assert_allclose(
            row_S[i], expected_S[i], rtol=relative_S[i], atol=tolerance_S[i], err_msg=f"{name} of {values}"
        )


@settings(max_examples=20, deadline=None, phases=NO_SHRINKING)
@given(tensors=st.lists(gradients(), min_size=1, max_size=3))
def test_statistics_equal_the_obvious_ones(tensors):
    with np.errstate(all="ignore"):  # as a GPU does
        row_SL = triton_reduce.statistics(tensors)

    for i, values in enumerate(tensors):
        assert_right(row_SL[:, i].numpy(), values)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_huge_values_beside_an_infinite_one_do_not_become_one(dtype):
    values = torch.tensor([0.9 * torch.finfo(dtype).max] * 20 + [-math.inf]).to(dtype)

    assert_right(triton_reduce.statistics([values])[:, 0].numpy(), values)


def test_many_chunks_add_up():
    values = torch.randn(CHUNK * 140 + 17, generator=torch.Generator().manual_seed(0)) + 3

    assert_right(triton_reduce.statistics([values])[:, 0].numpy(), values)


def test_a_factor_undoes_a_loss_scale():
    values = torch.randn(100)

    scaled_S = triton_reduce.statistics([values * 1024], factor=1 / 1024)

    torch.testing.assert_close(scaled_S, triton_reduce.statistics([values]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("order", [1, -1])
def test_a_tensor_has_the_same_bits_beside_any_others(order):
    values = [torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in (5, CHUNK + 3, 1)][::order]

    together_SL = triton_reduce.statistics(values)

    alone = [triton_reduce.statistics([v])[:, 0] for v in values]
    np.testing.assert_array_equal(together_SL.numpy(), torch.stack(alone, dim=1).numpy())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [0, 1, triton_reduce.LAUNCH, triton_reduce.LAUNCH + 7])
def test_histograms_equal_the_obvious_ones(dtype, length):
    values = 10.0 ** torch.empty(length).uniform_(-16, 6, generator=torch.Generator().manual_seed(length))
    values[::2] *= -1
    values[: 3 * len(SPECIALS) : 3] = torch.tensor(SPECIALS)[: len(values[: 3 * len(SPECIALS) : 3])]
    values = values.to(dtype)

    counts_B = triton_reduce.histogram(
        values, shift=histograms._SHIFT, lowest=histograms._LOWEST_KEY, side=histograms._SIDE
    )

    finite = values[~values.isnan()]
    np.testing.assert_array_equal(counts_B.numpy(), reference.histogram(finite, histograms.bin_edges()))


@pytest.mark.parametrize("length", [1, 8, triton_reduce.LAUNCH + 3])
def test_checksums_equal_those_of_the_cpu(length):
    words = torch.randint(-(2**62), 2**62, (length,), generator=torch.Generator().manual_seed(length))

    total = triton_reduce.sum_words(words, golden=batch_hash.signed(batch_hash.GOLDEN_64))

    assert int(total) == int(batch_hash._sum_words(words))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("special", "is_finite"), [(1.0, True), (math.nan, False), (math.inf, False), (-math.inf, False)]
)
def test_values_that_are_not_finite_are_found_in_any_chunk(dtype, special, is_finite):
    values = torch.full((triton_reduce.LAUNCH + 2,), torch.finfo(dtype).max, dtype=dtype)
    values[-1] = special

    assert bool(triton_reduce.is_finite(values)) is is_finite
