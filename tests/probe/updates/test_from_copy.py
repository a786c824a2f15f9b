"""Updates are measured against the weights of before the step."""

import numpy as np
import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwatch.probe.device import backend as kernels
from gradwatch.probe.device import sync
from gradwatch.probe.updates.from_copy import CopyUpdateProbe

every_kernel = pytest.mark.parametrize(
    "kernel",
    [
        pytest.param(
            "native", marks=pytest.mark.skipif(kernels.select_backend() is None, reason="the extension is not built")
        ),
        "torch",
    ],
)


@every_kernel
@settings(max_examples=100)
@given(
    seed=st.integers(0, 2**32 - 1),
    length=st.sampled_from([0, 1, 15, 17, 1024, 1030, 4001]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    step=st.sampled_from([0.0, 1e-25, 1e-7, 1e-3, 1.0]),
)
def test_ratios_equal_the_obvious_ones(kernel, seed, length, dtype, step):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(length, generator=generator, dtype=torch.float64).to(dtype)
    param = torch.nn.Parameter(weight.clone())
    probe = CopyUpdateProbe([param], kernel=kernel)

    probe.before()
    with torch.no_grad():
        param.add_(step * torch.randn(length, generator=generator, dtype=torch.float64).to(dtype))
    row_S = sync.to_host(probe.after())[:, 0]

    expected_S = reference.update_statistics(weight, param)
    np.testing.assert_allclose(row_S, expected_S, rtol=1e-5, atol=1e-9, err_msg=f"after a step of {step}")


@every_kernel
@settings(max_examples=100)
@given(
    seed=st.integers(0, 2**32 - 1),
    length=st.sampled_from([1, 16, 17, 1024, 1030, 3000]),
    decade=st.integers(-36, 37),
    ratio=st.sampled_from([1.0, 1e-2, 1e-4]),
    still=st.sampled_from([0.0, 0.5, 0.999]),
)
def test_ratios_hold_at_any_size_of_the_weights(kernel, seed, length, decade, ratio, still):
    rng = np.random.default_rng(seed)
    weight = torch.from_numpy(rng.uniform(0.1, 0.9, length) * 10.0**decade).float()
    update = torch.from_numpy(rng.normal(size=length) * (rng.random(length) >= still)) * ratio * 10.0**decade
    param = torch.nn.Parameter(weight.clone())
    probe = CopyUpdateProbe([param], kernel=kernel)

    probe.before()
    with torch.no_grad():
        param.copy_((weight.double() + update).float())
    row_S = sync.to_host(probe.after())[:, 0]

    expected_S = reference.update_statistics(weight, param)
    np.testing.assert_allclose(row_S, expected_S, rtol=1e-5, err_msg="weights of some parts may not move at all")


@every_kernel
def test_tiny_updates_are_not_lost(kernel):
    param = torch.nn.Parameter(torch.full((50,), 1e-25))
    probe = CopyUpdateProbe([param], kernel=kernel)

    probe.before()
    with torch.no_grad():
        param.mul_(1.5)

    assert float(probe.after()[1, 0]) == pytest.approx(0.5), "squares of 1e-25 do not fit a float32"


@every_kernel
@pytest.mark.parametrize(("weight", "after"), [(0.0, 0.0), (0.0, 1.0), (1.0, np.nan), (1.0, np.inf), (np.nan, 1.0)])
def test_a_ratio_that_is_no_number_is_nan(kernel, weight, after):
    param = torch.nn.Parameter(torch.full((3,), weight))
    probe = CopyUpdateProbe([param], kernel=kernel)

    probe.before()
    with torch.no_grad():
        param.fill_(after)

    assert np.isnan(sync.to_host(probe.after())[1, 0]), "finite or nan, nothing else"


@every_kernel
def test_every_kind_of_weight_is_kept(kernel):
    generator = torch.Generator().manual_seed(4)
    weights = [
        torch.randn(4, 3, 5, 5, generator=generator).to(memory_format=torch.channels_last),
        torch.randn(6, 4, generator=generator)[:, ::2],
        torch.randn(7, dtype=torch.complex64, generator=generator),
        torch.randn((), generator=generator),
    ]
    params = [torch.nn.Parameter(w.clone(memory_format=torch.preserve_format)) for w in weights]
    params[1] = torch.nn.Parameter(torch.randn(6, 4, generator=generator)[:, ::2])
    weights[1] = params[1].detach().clone()
    probe = CopyUpdateProbe(params, kernel=kernel)

    for _ in range(2):  # the second time the copies are there already
        probe.before()
        kept = [p.detach().clone() for p in params]
        with torch.no_grad():
            for param in params:
                param.mul_(1.01)
        row_2L = sync.to_host(probe.after())

        for i, (before, after) in enumerate(zip(kept, params, strict=True)):
            expected = reference.update_statistics(before, after)
            np.testing.assert_allclose(row_2L[:, i], expected, rtol=1e-4, err_msg=f"weight {i}")


def test_after_without_before_is_a_mistake():
    probe = CopyUpdateProbe([torch.nn.Parameter(torch.ones(2))])
    probe.before()
    probe.after()

    with pytest.raises(AssertionError, match="before"):
        probe.after()


def test_the_weights_can_be_measured_without_an_update():
    weights = [torch.randn(3, 4), torch.randn(5).bfloat16(), torch.randn(2, dtype=torch.complex64), torch.empty(0)]
    norms, ratios = CopyUpdateProbe([torch.nn.Parameter(weight) for weight in weights]).norms()

    expected = [torch.linalg.vector_norm(weight.to(torch.complex64)) for weight in weights]
    torch.testing.assert_close(norms, torch.stack(expected))
    assert ratios.isnan().all()
