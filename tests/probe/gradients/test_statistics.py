"""Every gradient is read right, by either kernel, whatever its dtype, layout and values."""

import numpy as np
import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwatch.probe.device import backend as kernels
from gradwatch.probe.device import sync
from gradwatch.probe.gradients.statistics import GradientProbe

KERNELS = [
    pytest.param(
        "native", marks=pytest.mark.skipif(kernels.select_backend() is None, reason="the extension is not built")
    ),
    "torch",
]
every_kernel = pytest.mark.parametrize("kernel", KERNELS)
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]

# Around the edges of lanes (16) and blocks (1024), and small.
LENGTHS = st.one_of(st.integers(0, 40), st.sampled_from([1008, 1023, 1024, 1025, 1040, 2047, 2048, 2049, 5000]))
SPECIALS = [0.0, -0.0, np.nan, np.inf, -np.inf, 1e-45, -1e-40, 1e-30, 3e38, -1e30, 1.0]
STEP = 1.5e-45  # from one float32 to the next near zero, and what the comparison rounds


@st.composite
def gradients(draw):
    """Normal values of any scale and offset, a few of them replaced by special ones."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scale = 10.0 ** draw(st.integers(-44, 30))
    offset = draw(st.sampled_from([0.0, 0.0, 1.0, -30.0, 1000.0]))
    x = (rng.normal(size=draw(LENGTHS)) + offset) * scale
    for special in draw(st.lists(st.sampled_from(SPECIALS), max_size=3)):
        x[rng.random(len(x)) < draw(st.sampled_from([0.001, 0.3]))] = special
    return torch.from_numpy(x).to(draw(st.sampled_from(DTYPES)))


def read(grads, kernel, **keywords):
    params = [torch.nn.Parameter(torch.empty_like(g, layout=torch.strided)) for g in grads if g is not None]
    missing = torch.nn.Parameter(torch.zeros(2))
    ordered = []
    for grad in grads:
        param = missing if grad is None else params.pop(0)
        param.grad = grad
        ordered.append(param)
    return sync.to_host(GradientProbe(ordered, kernel=kernel).read(**keywords))


def coo(indices, values, shape):
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=True)


def assert_right(row_S, grad):
    expected_S = reference.gradient_statistics(grad)
    with np.errstate(over="ignore"):
        expected_S[:4] = expected_S[:4].astype(np.float32)
    absmax = expected_S[1] if np.isfinite(expected_S[1]) else 0.0
    tolerance_S = np.array([STEP, 0, 2e-6 * absmax + STEP, 5e-8 * absmax + STEP, 0, 0])
    relative_S = np.array([1e-5, 0, 1e-5, 1e-5, 1e-7, 0])
    for i, name in enumerate(["l2", "absmax", "mean", "std", "zero_frac", "nonfinite"]):
        np.testing.assert_allclose(
            row_S[i], expected_S[i], rtol=relative_S[i], atol=tolerance_S[i], err_msg=f"{name} of {grad}"
        )


@every_kernel
@settings(max_examples=300)
@given(grad=gradients())
def test_statistics_equal_the_obvious_ones(kernel, grad):
    assert_right(read([grad], kernel)[:, 0], grad)


@every_kernel
@pytest.mark.parametrize("ratio", [0.5, 3.0, 30.0, 1000.0])
def test_variance_holds_where_the_mean_is_large_beside_the_spread(kernel, ratio):
    grad = torch.randn(100_000, generator=torch.Generator().manual_seed(3)) * 1e-3 + ratio * 1e-3

    std = read([grad], kernel)[3, 0]

    expected = reference.gradient_statistics(grad)[3]
    assert (std / expected) ** 2 == pytest.approx(1, abs=1e-5), "variance must be within 1e-5 of float64"


@every_kernel
def test_constant_gradients_have_no_spread(kernel):
    row_SL = read([torch.full((777,), 0.1), torch.full((1,), -3.0)], kernel)

    np.testing.assert_allclose(row_SL[3], 0, atol=1e-8, err_msg="std of a constant")
    np.testing.assert_allclose(row_SL[2], [0.1, -3.0], rtol=1e-7, err_msg="mean of a constant")


@every_kernel
def test_every_layout_is_read_as_what_it_means(kernel):
    generator = torch.Generator().manual_seed(1)
    dense = torch.randn(8, 6, 5, 4, generator=generator)
    rows, columns = torch.tensor([0, 3, 3]), torch.tensor([1, 2, 2])  # one place twice: its values add up
    sparse = coo(torch.stack([rows, columns]), torch.tensor([1.0, 2.0, 3.0]), (5, 40))
    hybrid = coo(torch.tensor([[4, 1]]), torch.randn(2, 7, generator=generator), (9, 7))
    grads = [
        dense.to(memory_format=torch.channels_last),
        dense.permute(3, 1, 0, 2),
        dense[::2, :, 1:3],
        torch.tensor([1.0, -2.0]).expand(3, 2),
        torch.complex(dense, 2 * dense),
        torch.complex(dense, dense).conj(),
        torch._neg_view(dense[:, 1]),
        torch.complex(torch.ones(1), torch.ones(1)).conj().imag,
        sparse,
        hybrid,
        coo(torch.empty(1, 0, dtype=torch.int64), torch.empty(0), (6,)),
        torch.tensor(-2.5),
        torch.empty(3, 0),
        None,
    ]

    row_SL = read(grads, kernel)

    for i, grad in enumerate(grads):
        assert_right(row_SL[:, i], grad)


@every_kernel
def test_a_missing_gradient_is_nan_and_keeps_its_column(kernel):
    row_SL = read([torch.ones(3), None, torch.zeros(4)], kernel)

    assert np.isnan(row_SL).all(axis=0).tolist() == [False, True, False], "one column per parameter"


@every_kernel
def test_empty_gradients_have_norm_and_counts_zero_and_no_mean(kernel):
    row_S = read([torch.empty(0)], kernel)[:, 0]

    np.testing.assert_array_equal(row_S, [0, 0, np.nan, np.nan, np.nan, 0])


@every_kernel
def test_no_parameters_give_no_columns(kernel):
    assert GradientProbe([], kernel=kernel).read().shape == (6, 0), "statistics first"


@every_kernel
def test_inverse_scale_undoes_a_loss_scale(kernel):
    grad = torch.randn(3000, generator=torch.Generator().manual_seed(2))
    sparse = torch.eye(4).to_sparse()

    scaled_SL = read([grad * 65536, sparse * 65536, None], kernel, inverse_scale=1 / 65536)

    np.testing.assert_array_equal(scaled_SL, read([grad, sparse, None], kernel), "powers of two scale exactly")


@every_kernel
def test_gradients_that_come_go_and_change_are_looked_up_anew(kernel):
    param = torch.nn.Parameter(torch.zeros(100))
    probe = GradientProbe([param], kernel=kernel)
    norms = []
    for grad in (torch.full((100,), 2.0), None, torch.full((100,), 3.0), torch.ones(100).to_sparse()):
        param.grad = grad
        norms.append(float(probe.read()[0, 0]))

    assert norms == pytest.approx([20, np.nan, 30, 10], nan_ok=True), "each read sees the gradient of its moment"


def test_rows_of_earlier_reads_stay_as_they_were():
    param = torch.nn.Parameter(torch.zeros(4))
    probe = GradientProbe([param])
    param.grad = torch.ones(4)
    first = probe.read()
    before = first.clone()

    param.grad = torch.zeros(4)
    probe.read()

    assert torch.equal(first, before), "a row belongs to its caller"


@pytest.mark.skipif(kernels.select_backend() is None, reason="the extension is not built")
def test_the_extension_refuses_an_output_that_is_too_small():
    native = kernels.select_backend()

    with pytest.raises(ValueError, match="large enough"):
        native.statistics((torch.ones(3), torch.ones(3)), False, torch.empty(11), 1.0, None, 0, 0, 1)
