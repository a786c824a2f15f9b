"""What a stock optimizer leaves behind tells how far it moved the weights, as a copy of them would."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gradwatch
from gradwatch.monitor import Schedule
from gradwatch.probe.device import backend as kernels
from gradwatch.probe.updates.from_copy import CopyUpdateProbe
from gradwatch.probe.updates.from_moments import MomentUpdateProbe

pytestmark = pytest.mark.skipif(kernels.select_backend() is None, reason="the extension is not built")

BIT = 2.0**-22
TRACED = {
    "adamw": (torch.optim.AdamW, {}),
    "adamw, amsgrad": (torch.optim.AdamW, {"amsgrad": True, "weight_decay": 0.3}),
    "adamw, maximize": (torch.optim.AdamW, {"maximize": True, "betas": (0.3, 0.9)}),
    "adam": (torch.optim.Adam, {}),
    "adam, decay": (torch.optim.Adam, {"weight_decay": 0.1, "foreach": True}),
    "adam, fused": (torch.optim.Adam, {"fused": True}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9}),
    "sgd, fused": (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
    "sgd, dampened": (torch.optim.SGD, {"momentum": 0.8, "dampening": 0.4, "weight_decay": 0.1, "foreach": True}),
}


def assert_close(traced_2L, kept_2L):
    (norm_L, ratio_L), (kept_L, expected_L) = traced_2L.double().numpy(), kept_2L.double().numpy()
    updates_L = np.nan_to_num(kept_L * expected_L)
    assert (np.abs(norm_L - kept_L) <= 1e-6 * kept_L + 2 * BIT * updates_L).all(), (norm_L, kept_L)
    is_tame_L = ~(expected_L > 1e6)  # the weight is lost in the rounding of the update otherwise
    np.testing.assert_array_equal(np.isnan(ratio_L[is_tame_L]), np.isnan(expected_L[is_tame_L]))
    is_told_L = is_tame_L & ~np.isnan(expected_L)
    expected_L, ratio_L = expected_L[is_told_L], ratio_L[is_told_L]
    allowed_L = (1e-4 + 2 * BIT * expected_L) * expected_L + BIT
    assert (np.abs(ratio_L - expected_L) <= allowed_L).all(), (ratio_L, expected_L)


@settings(max_examples=150)
@given(
    name=st.sampled_from([*TRACED]),
    seed=st.integers(0, 2**32 - 1),
    length=st.sampled_from([0, 1, 2, 17, 1024, 1030, 4001]),
    rate=st.sampled_from([0.0, 1e-9, 1e-7, 1e-5, 1e-3, 0.1, 1.0]),
    size=st.sampled_from([0.0, 1e-8, 1e-3, 1.0, 1e4]),
)
def test_a_trace_tells_what_a_copy_would(name, seed, length, rate, size):
    kind, options = TRACED[name]
    generator = torch.Generator().manual_seed(seed)
    params = [torch.nn.Parameter(torch.randn(length, generator=generator) * size), torch.nn.Parameter(torch.ones(3))]
    optimizer = kind(params, lr=rate, **options)
    traces, copies = MomentUpdateProbe(params, optimizer), CopyUpdateProbe(params)

    for step in range(3):
        params[0].grad = torch.randn(length, generator=generator)
        params[1].grad = None if step == 1 else torch.ones(3)
        assert traces.before()
        copies.before()
        optimizer.step()
        optimizer.zero_grad()

        assert_close(traces.after(), copies.after())


def test_a_schedule_that_goes_on_before_the_look_changes_nothing():
    params = [torch.nn.Parameter(torch.ones(5))]
    optimizer = torch.optim.SGD(params, lr=torch.tensor(0.1), momentum=0.9)
    traces = MomentUpdateProbe(params, optimizer)
    params[0].grad = torch.ones(5)

    traces.before()
    optimizer.step()
    optimizer.param_groups[0]["lr"].fill_(7.0)

    assert traces.after()[1, 0] == pytest.approx(0.1, rel=1e-6)


def test_parameters_of_no_group_stand_still():
    params = [torch.nn.Parameter(torch.full((4,), float(i + 1))) for i in range(3)]
    optimizer = torch.optim.Adam([params[2]], lr=0.1)
    traces = MomentUpdateProbe(params, optimizer)
    params[2].grad = torch.ones(4)

    traces.before()
    optimizer.step()

    np.testing.assert_allclose(traces.after().numpy(), [[2, 4, 6], [0, 0, 0.1 / 3]], rtol=1e-6)


def plain_sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def nesterov(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True)


def other_rule(params):
    return torch.optim.RMSprop(params)


def subclass(params):
    return type("AdamW", (torch.optim.AdamW,), {})(params)


def extreme_decay(params):
    return torch.optim.AdamW(params, lr=1.0, weight_decay=0.9)


@pytest.mark.parametrize("make", [plain_sgd, nesterov, other_rule, subclass, extreme_decay], ids=lambda m: m.__name__)
def test_what_leaves_too_little_behind_is_left_to_copies(make):
    params = [torch.nn.Parameter(torch.ones(3))]

    assert not MomentUpdateProbe(params, make(params)).before()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64])
def test_other_formats_are_left_to_copies(dtype):
    params = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3, dtype=dtype))]

    assert not MomentUpdateProbe(params, torch.optim.Adam(params)).before()


def test_a_state_that_is_not_as_expected_is_left_to_copies_from_then_on():
    params = [torch.nn.Parameter(torch.ones(3))]
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    traces = MomentUpdateProbe(params, optimizer)
    params[0].grad = torch.ones(3).to_sparse()

    assert traces.before()
    optimizer.step()

    assert traces.after() is None
    assert not traces.before()


def test_watching_a_stock_optimizer_keeps_no_copy(monkeypatch):
    def keep(*_):
        raise AssertionError("the weights were copied")

    monkeypatch.setattr(CopyUpdateProbe, "before", keep)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with gradwatch.watch(model, optimizer, schedule=Schedule(updates=1, activations=0)) as monitor:
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(torch.ones(1, 4)).sum()
            loss.backward()
            optimizer.step()
            monitor.step(loss)

    assert (monitor.history["update.ratio"] > 0).all()
    assert monitor.history["update.ratio"].shape == (3, 2)
