"""A watched step moves weights as torch's fused step does, to the bit, and tells what it read."""

import copy
import inspect
import io
import itertools
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rounding import RoundingBounds
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gradwatch import optim
from gradwatch.errors import GradwatchError
from gradwatch.probe.device import backend as kernels
from gradwatch.probe.gradients.statistics import GradientProbe
from gradwatch.probe.updates.from_copy import CopyUpdateProbe

pytestmark = pytest.mark.skipif(kernels.select_backend() is None, reason="the extension is not built")

# Where torch has fused multiply-add, the watched step fuses the same; elsewhere compilers differ in the last bit.
HAS_SAME_BITS = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
SHAPES = [(), (1,), (7,), (0,), (16,), (3, 5), (33,), (31, 67), (2, 3, 4, 5)]
ADAMS = [
    {"weight_decay": w, "amsgrad": a, "maximize": m, "betas": b}
    for w, a, m, b in itertools.product((0.0, 0.03), (False, True), (False, True), ((0.9, 0.999), (0.3, 0.8)))
]
SGDS = [
    {},
    {"weight_decay": 0.1},
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.2, "weight_decay": 0.01, "maximize": True},
    {"momentum": 0.8, "nesterov": True, "weight_decay": 0.01},
]
OPTIONS = [("AdamW", o) for o in ADAMS] + [("Adam", o) for o in ADAMS] + [("SGD", o) for o in SGDS]
every_kind = pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD"])


def parameters(shapes=SHAPES, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def momentum_of(name):
    return {"momentum": 0.9} if name == "SGD" else {}


def pair(name, shapes=SHAPES, **options):
    """Torch's fused optimizer and ours, over equal parameters."""
    theirs, ours = parameters(shapes), parameters(shapes)
    torchs = getattr(torch.optim, name)(theirs, fused=True, **options)
    return (theirs, torchs), (ours, getattr(optim, name)(ours, **options))


def give_gradients(*sides, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    for params in zip(*sides, strict=True):
        grad = torch.randn(params[0].shape, generator=generator) * scale
        for param in params:
            param.grad = grad.clone()


def assert_same(theirs, ours):
    for i, (a, b) in enumerate(zip(theirs, ours, strict=True)):
        if HAS_SAME_BITS:
            assert torch.equal(a, b), f"parameter {i} of shape {tuple(a.shape)}"
        else:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def assert_rounds_alike(theirs, ours, bound, *, equal_nan=False):
    """Assert equal bits where torch has fused multiply-add, elsewhere a distance that is within the bound."""
    is_same = (theirs == ours) | (theirs.isnan() & ours.isnan() & equal_nan)
    distance = (theirs.double() - ours.double()).abs()
    is_near = is_same if HAS_SAME_BITS else is_same | ((distance <= bound) & bound.isfinite())
    assert is_near.all(), f"{distance[~is_near]} where rounding explains {bound[~is_near]}"


def assert_same_state(torchs, ours, bounds):
    for (param, a), b in zip(torchs.state.items(), ours.state.values(), strict=True):
        assert [*a] == [*b], "the names and order of torch's state"
        for name in a:
            assert_rounds_alike(a[name], b[name], bounds.state[param][name])


def watching(optimizer, params):
    row_SL = torch.full((8, len(params)), -7.0)
    optimizer.watch({p: i for i, p in enumerate(params)})
    optimizer.gradients_SL, optimizer.changes_2L = row_SL[:6], row_SL[6:]
    return row_SL


def assert_equal_rows(got, expected):
    np.testing.assert_array_equal(got.numpy(), expected.numpy())


@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=lambda v: v if isinstance(v, str) else str(v))
def test_weights_and_state_are_those_of_torch(name, options):
    (theirs, torchs), (ours, own) = pair(name, lr=1e-2, **options)
    bounds = RoundingBounds(torchs)

    for step in range(12):
        give_gradients(theirs, ours, seed=step, scale=10.0 ** (step % 5 - 2))
        torchs.step()
        own.step()

    for a, b in zip(theirs, ours, strict=True):
        assert_rounds_alike(a, b, bounds.weights[a])
    if name != "SGD":
        assert_same_state(torchs, own, bounds)


@every_kind
def test_thousands_of_steps_stay_the_same(name):
    (theirs, torchs), (ours, own) = pair(name, [(17,), (5, 9), (40,)], lr=1e-3, weight_decay=0.01, **momentum_of(name))

    for step in range(3000):
        give_gradients(theirs, ours, seed=step)
        torchs.step()
        own.step()

    assert_same(theirs, ours)


@pytest.mark.skipif(not HAS_SAME_BITS, reason="without fused multiply-add, compilers differ in the last bit")
@pytest.mark.parametrize(("name", "options"), [("AdamW", {}), ("Adam", {"amsgrad": True}), ("SGD", {"momentum": 0.9})])
def test_gradients_beyond_all_bounds_move_weights_as_in_torch(name, options):
    specials = [np.inf, -np.inf, np.nan, 3e38, -1e30, 1e19, 1e-19, 1e-30, 1e-45, 0.0, -0.0, 1.0]
    (theirs, torchs), (ours, watched) = pair(name, [(40, 12)], **options)
    rng = np.random.default_rng(7)

    for _ in range(30):
        grad = torch.from_numpy(rng.permuted(np.tile(np.float32(specials), (40, 1)), axis=0))
        grad[::2] = torch.from_numpy(10.0 ** rng.uniform(-45, 38, (20, 12))).float()
        theirs[0].grad, ours[0].grad = grad.clone(), grad.clone()
        torchs.step()
        watched.step()
        torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=0, equal_nan=True)


@every_kind
def test_the_default_step_of_torch_differs_by_rounding_alone(name):
    theirs, ours = parameters(), parameters()
    torchs = getattr(torch.optim, name)(theirs, lr=1e-3, **momentum_of(name))
    own = getattr(optim, name)(ours, lr=1e-3, **momentum_of(name))

    for step in range(300):
        give_gradients(theirs, ours, seed=step)
        torchs.step()
        own.step()

    for a, b in zip(theirs, ours, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


SPECIALS = [0.0, -0.0, np.nan, np.inf, -np.inf, 1e-45, -1e-40, 1e-30, 3e38]


@st.composite
def gradients(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    length = draw(st.one_of(st.integers(0, 40), st.sampled_from([1008, 1023, 1024, 1025, 1040, 2049, 5000])))
    x = (rng.normal(size=length) + draw(st.sampled_from([0.0, 1.0, 1000.0]))) * 10.0 ** draw(st.integers(-44, 30))
    for special in draw(st.lists(st.sampled_from(SPECIALS), max_size=3)):
        x[rng.random(length) < 0.1] = special
    return torch.from_numpy(x).float()


@settings(max_examples=150, deadline=None)
@given(grad=gradients(), name=st.sampled_from(["AdamW", "Adam", "SGD"]), order=st.sampled_from([0, 1]))
def test_statistics_have_the_bits_of_the_probes(grad, name, order):
    (theirs, torchs), (ours, own) = pair(name, [grad.shape, (4,)], lr=1e-2, **momentum_of(name))
    row_SL = watching(own, ours[:: -1 if order else 1])
    probed = ours[:: -1 if order else 1]
    ours[0].grad, theirs[0].grad = grad.clone(), grad.clone()
    gradient_probe, update_probe = GradientProbe(probed), CopyUpdateProbe(probed)
    bounds = RoundingBounds(torchs)

    expected_SL = gradient_probe.read()
    update_probe.before()
    own.step()
    torchs.step()

    assert_equal_rows(row_SL[:6], expected_SL)
    assert_equal_rows(row_SL[6:], update_probe.after())
    assert_rounds_alike(theirs[0], ours[0], bounds.weights[theirs[0]], equal_nan=True)


@every_kind
def test_statistics_and_weights_do_not_depend_on_the_number_of_threads(name):
    shapes = [(1100, 1000), (700, 1000), (999,), (401, 1000)]  # more than the 8 MB from which threads are used
    rows, weights = [], []
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            ours = parameters(shapes)
            own = getattr(optim, name)(ours, lr=1e-2, **momentum_of(name))
            rows.append(watching(own, ours))
            for step in range(2):
                give_gradients(ours, seed=step)
                own.step()
            weights.append(ours)
    finally:
        torch.set_num_threads(before)

    assert_equal_rows(rows[0], rows[1])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True)), "one parameter is one thread's"


def test_a_parameter_without_gradient_stays_and_is_told_apart():
    ours = parameters([(3,), (4,)])
    own = optim.AdamW(ours, lr=0.1)
    row_SL = watching(own, ours)
    ours[1].grad = torch.ones(4)
    weight = ours[0].detach().clone()

    own.step()

    assert torch.isnan(row_SL[:6, 0]).all(), "nan, since there is none"
    assert row_SL[6:, 0].tolist() == [pytest.approx(float(weight.norm())), 0.0]
    assert torch.equal(ours[0], weight)
    assert list(own.state) == [ours[1]], "torch makes no state for it either"


def test_only_what_was_asked_for_is_written():
    ours = parameters([(3,)])
    own = optim.SGD(ours, lr=0.1)
    row_SL = watching(own, ours)
    give_gradients(ours, seed=0)

    own.changes_2L = None
    own.step()
    assert row_SL[0, 0] > 0
    assert (row_SL[6:] == -7).all(), "no updates were asked for"

    own.watch(None)
    row_SL.fill_(-7)
    own.step()
    assert (row_SL == -7).all(), "nobody watches"


def test_parameters_that_come_later_are_moved_and_have_no_column():
    ours = parameters([(3,), (2,)])
    own = optim.AdamW(ours[:1], lr=0.1)
    row_SL = watching(own, ours[:1])
    give_gradients(ours, seed=0)
    own.step()
    before = ours[1].detach().clone()

    own.add_param_group({"params": ours[1:], "lr": 0.5})
    own.step()

    assert row_SL.shape == (8, 1)
    assert torch.allclose(before - ours[1], 0.5 * ours[1].grad.sign(), atol=0.02), "its own rate, its first step"


@every_kind
def test_either_loads_the_state_of_the_other(name):
    options = dict(lr=1e-2, weight_decay=0.1, **momentum_of(name))
    (theirs, torchs), (ours, own) = pair(name, **options)
    for step in range(4):
        give_gradients(theirs, ours, seed=step)
        torchs.step()
        own.step()
    saved = io.BytesIO()
    torch.save(own.state_dict(), saved)
    saved.seek(0)

    swapped_torchs = getattr(torch.optim, name)(ours, lr=9.0, fused=True)
    swapped_torchs.load_state_dict(torch.load(saved, weights_only=True))
    swapped_own = getattr(optim, name)(theirs, lr=9.0)
    swapped_own.load_state_dict(copy.deepcopy(torchs.state_dict()))
    for group in swapped_torchs.param_groups:
        group["fused"] = True
    for step in range(4, 8):
        give_gradients(theirs, ours, seed=step)
        swapped_torchs.step()
        swapped_own.step()

    assert_same(theirs, ours)
    assert own.state_dict()["param_groups"][0].keys() == torchs.state_dict()["param_groups"][0].keys()


def test_step_counts_of_double_are_taken_over():
    ours = parameters([(5,)])
    own = optim.Adam(ours)
    give_gradients(ours, seed=0)
    own.step()
    state = copy.deepcopy(own.state_dict())
    state["state"][0]["step"] = state["state"][0]["step"].double()

    own.load_state_dict(state)
    own.step()

    assert own.state[ours[0]]["step"] == 2


@every_kind
def test_arguments_and_defaults_are_those_of_torch(name):
    theirs, ours = getattr(torch.optim, name), getattr(optim, name)

    assert inspect.signature(ours) == inspect.signature(theirs)
    assert ours(parameters()).defaults == theirs(parameters()).defaults


@pytest.mark.parametrize("mode", ["differentiable", "capturable"])
def test_modes_that_are_not_supported_are_refused_by_name(mode):
    with pytest.raises(GradwatchError, match=f"AdamW: {mode}=True is not supported .*use torch.optim.AdamW"):
        optim.AdamW(parameters(), **{mode: True})


@every_kind
def test_schedules_and_tensor_rates_drive_it(name):
    rates = {"theirs": torch.tensor(0.1), "ours": torch.tensor(0.1)}
    theirs, ours = parameters(), parameters()
    torchs = getattr(torch.optim, name)(theirs, lr=rates["theirs"], fused=True)
    own = getattr(optim, name)(ours, lr=rates["ours"])
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, gamma=0.7) for o in (torchs, own)]

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as that the schedule was called before the optimizer
        for step in range(5):
            give_gradients(theirs, ours, seed=step)
            torchs.step()
            own.step()
            for schedule in schedules:
                schedule.step()

    assert own.param_groups[0]["lr"] == pytest.approx(0.1 * 0.7**5)
    assert_same(theirs, ours)


def test_a_closure_gives_gradients_and_loss():
    ours = parameters([(3,)])
    own = optim.SGD(ours, lr=0.5)
    row_SL = watching(own, ours)
    weight = ours[0].detach().clone()

    def closure():
        own.zero_grad()
        loss = ours[0].square().sum() / 2
        loss.backward()
        return loss

    loss = own.step(closure)

    assert float(loss.detach()) == pytest.approx(float(weight.square().sum()) / 2)
    torch.testing.assert_close(ours[0].detach(), weight / 2)
    assert row_SL[0, 0] == pytest.approx(float(weight.norm())), "the gradient that the closure made"


def test_hooks_of_the_optimizer_and_of_all_are_called_in_the_order_of_torch():
    (theirs, torchs), (ours, own) = pair("AdamW")
    calls = {torchs: [], own: []}
    shared = register_optimizer_step_pre_hook(lambda o, a, k: calls[o].append(("global", len(a), k)))
    try:
        for optimizer, params in ((torchs, theirs), (own, ours)):
            optimizer.register_step_pre_hook(lambda o, a, k: calls[o].append(("before", len(a), k)))
            optimizer.register_step_post_hook(lambda o, a, k: calls[o].append(("after", len(a), k)))
            give_gradients(params, seed=0)
            optimizer.step()
            optimizer.step(closure=None)
    finally:
        shared.remove()

    assert [c[0] for c in calls[own]] == ["global", "before", "after"] * 2
    assert [c[:2] for c in calls[own]] == [c[:2] for c in calls[torchs]]


def test_the_profiler_sees_the_step():
    ours = parameters([(3,)])
    own = optim.AdamW(ours)
    give_gradients(ours, seed=0)

    with torch.profiler.profile() as profile:
        own.step()

    assert "Optimizer.step#AdamW.step" in {event.key for event in profile.key_averages()}


def test_autograd_knows_that_weights_moved():
    ours = parameters([(3,)])
    own = optim.SGD(ours, lr=0.1)
    give_gradients(ours, seed=0)
    loss = (ours[0] * ours[0]).sum()

    own.step()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_copies_step_by_themselves_and_watch_nothing():
    model = torch.nn.Linear(3, 2)
    own = optim.AdamW(model.parameters(), lr=0.1)
    row_SL = watching(own, list(model.parameters()))
    give_gradients(list(model.parameters()), seed=0)
    own.step()

    other, copied = copy.deepcopy((model, own))
    row_SL.fill_(-7)
    give_gradients(list(model.parameters()), list(other.parameters()), seed=1)
    copied.step()
    assert (row_SL == -7).all()

    own.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
