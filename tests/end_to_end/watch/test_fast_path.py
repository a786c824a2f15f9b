"""The fast path records most steps, and its rows are bit-identical to those of the full path."""

import gc
import itertools
import math
import sys
import time
import weakref

import fast_path_steps
import numpy as np
import pytest
import torch
from end_to_end.watch.loops import batches, loss_of, make
from torch import nn

import gradwatch
from gradwatch import catalogue
from gradwatch.history.store import WINDOW
from gradwatch.monitor import Schedule, total_norm
from gradwatch.monitor.readings.optimizer_tracker import OptimizerTracker

TIMES = catalogue.CLOCK_NAMES - {"data_wait_ms"}  # a watched loop does not measure it
SCHEDULE = Schedule(updates=10, activations=10, histograms=0, budget=0)
STEPS = 45


class Embedded(nn.Module):
    """A model with sparse gradients, normalisation, dropout and a parameter that nothing uses."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(20, 8, sparse=True)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))
        self.unused = nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return self.body(self.embedding((x[:, 0].abs() * 7).long() % 20))


def usual(i, model, optimizer, monitor, x, y):
    optimizer.zero_grad()
    loss = loss_of(model, x, y)
    loss.backward()
    optimizer.step()
    monitor.step(loss, batch=x)


def with_everything_at_times(i, model, optimizer, monitor, x, y):
    optimizer.zero_grad()
    loss = loss_of(model, x, y)
    if i == 23:
        loss = loss * math.nan
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5) if i in (13, 14) else None
    if i not in (17, 23):  # two updates are left out
        optimizer.step()
    if i == 27:
        monitor.observe()
    optimizer.param_groups[0]["lr"] *= 0.9
    options = {"val_loss": 1.5} if i in (19, 33) else {}
    handed = {0: loss, 1: loss.item(), 2: loss.detach().double()}[i % 3]
    monitor.step(handed, batch=[(x, y), [x, y], {"x": x}, x.numpy(), None][i % 5], grad_norm=norm, **options)


def clipped(i, model, optimizer, monitor, x, y):
    optimizer.zero_grad()
    loss = loss_of(model, x, y)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5 if i % 3 else 1e3)
    optimizer.step()
    monitor.step(loss, batch=x, grad_norm={0: norm, 1: norm.item(), 2: norm.double()}[i % 3])


def with_views_by_name(i, model, optimizer, monitor, x, y):
    optimizer.zero_grad()
    loss = loss_of(model, x, y)
    loss.backward()
    optimizer.step()
    monitor.step(loss, batch={"inputs": x[:, :-1], "transposed": x.t(), "labels": (y, "each", i)})


def with_closures(i, model, optimizer, monitor, x, y):
    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        return loss

    if i % 4:
        loss = closure()
        optimizer.step()
    else:
        loss = optimizer.step(closure)
    monitor.step(loss, batch=x)


def with_surprises(i, model, optimizer, monitor, x, y):
    optimizer.zero_grad()
    loss = loss_of(model, x, y)
    loss.backward()
    if i == 12:
        optimizer.step()  # twice in one row
    if i in (13, 14):
        optimizer.param_groups[0]["lr"] = torch.tensor(1e-3) if i == 13 else 1e-3
    if i == 16:
        refused = optimizer.register_step_pre_hook(refuse)
        with pytest.raises(ArithmeticError):
            optimizer.step()
        refused.remove()
    else:
        optimizer.step()
    if i == 18:
        monitor.findings()
    if i == 22:
        monitor.charge(1e-6)
    if i == 24:
        optimizer.step()
    monitor.step(loss, batch=x if i % 7 else x[:, ::2])
    if i == 26:
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    if i == 28:
        del optimizer.param_groups[-1]
    if i == 34:
        monitor.restart()
    if i == 37:
        monitor.detach()


def refuse(*_):
    raise ArithmeticError("not this one")


def trained(update, make_model, make_optimizer):
    model = make_model().train()
    optimizer = make_optimizer(model)
    with gradwatch.watch(model, optimizer, schedule=SCHEDULE) as monitor:
        for i, (x, y) in enumerate(batches(STEPS)):
            torch.manual_seed(i)
            update(i, model, optimizer, monitor, x, y)
    return monitor.history, [p.detach().clone() for p in model.parameters()]


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def several_groups(model):
    first, *others = model.parameters()
    return torch.optim.RMSprop([{"params": [first], "lr": 1e-3}, {"params": others, "lr": torch.tensor(1e-3)}])


UPDATES = [usual, clipped, with_views_by_name, with_everything_at_times, with_closures, with_surprises]
MODELS = [(make, sgd), (make, adamw), (make, several_groups), (Embedded, sgd)]


def named(argument):
    return "-".join(f.__name__ for f in (argument if isinstance(argument, tuple) else (argument,)))


@pytest.mark.filterwarnings("ignore:gradwatch")
@pytest.mark.parametrize(("update", "made"), list(itertools.product(UPDATES, MODELS)), ids=named)
def test_a_row_is_the_same_on_the_fast_path_and_on_the_full_path(update, made, monkeypatch):
    if made[0] is Embedded and update in (clipped, with_everything_at_times) and torch.__version__.startswith("2.6."):
        pytest.skip(f"torch {torch.__version__} clips no sparse gradients")
    short, weights = trained(update, *made)
    monkeypatch.setattr(OptimizerTracker, "fast_path", lambda *_, **__: None)
    long, expected = trained(update, *made)

    assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))
    fast_path_steps.assert_alike(short, long, but=TIMES)


def test_the_total_norm_of_the_fast_path_is_bit_identical_to_that_of_the_full_path(monkeypatch):
    plain, rng = fast_path_steps.steps_of(monkeypatch), np.random.default_rng(0)
    params = nn.ParameterList([nn.Parameter(torch.zeros(())) for _ in range(90)])
    optimizer = torch.optim.SGD(params, lr=0.0)
    spreads = (0.0, 0.1, 3.0, 20.0)  # of logarithms: sums of numbers that are alike end in ties of rounding
    with gradwatch.watch(params, optimizer, schedule=SCHEDULE) as monitor:
        for i in range(WINDOW):
            gradients = np.exp(rng.normal(0, spreads[i % 4], len(params))).astype(np.float32)
            for param, gradient in zip(params, gradients, strict=True):
                param.grad = torch.tensor(gradient)
            optimizer.step()
            monitor.step(0.0)
        norms_T = monitor.history["grad_norm.before_clip"]
        rows_TSL = monitor.history.param.rows(thin=False)[1]

    assert norms_T.tolist() == [total_norm(row_SL) for row_SL in rows_TSL]
    np.testing.assert_allclose(norms_T, [math.hypot(*row_SL[0]) for row_SL in rows_TSL], rtol=1e-15)
    assert len(plain) > 0.7 * WINDOW


@pytest.mark.parametrize("update", [usual, clipped, with_views_by_name])
@pytest.mark.parametrize("make_optimizer", [sgd, adamw])
def test_steps_at_which_nothing_is_sampled_take_the_fast_path(update, make_optimizer, monkeypatch):
    plain = fast_path_steps.steps_of(monkeypatch)

    trained(update, make, make_optimizer)

    assert plain[-4:] == [41, 42, 43, 44]
    assert len(plain) > 0.7 * STEPS


def test_hundreds_of_steps_on_the_fast_path_hold_on_to_nothing():
    model = make()
    optimizer, (x, y) = adamw(model), next(batches(1))
    monitor = gradwatch.watch(model, optimizer, schedule=Schedule(updates=0, activations=0, histograms=0))
    counts, blocks = [], []
    for i in range(1000):
        optimizer.zero_grad(set_to_none=False)
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x)
        if i % 250 == 249:
            monitor.history.truncate(20)  # what it holds is no leak
            monitor.restart()
            gc.collect()
            held = [*model.parameters(), optimizer, x, loss, monitor._full_path.fast_path.native]
            counts.append([sys.getrefcount(it) for it in held])
            blocks.append(sys.getallocatedblocks())
    gone = weakref.ref(monitor), weakref.ref(monitor._full_path.fast_path)
    monitor.close()
    del monitor, held
    for _ in range(200):  # the thread lingers for a second; on a machine that stands still, a clock would run on
        if not any(it() for it in gone):
            break
        time.sleep(0.1)
        gc.collect()

    assert counts[1] == counts[-1]
    assert blocks[-1] < blocks[1] + 300, "objects, for 500 steps"
    assert [it() for it in gone] == [None, None]


def test_gradients_are_read_to_the_bit_alike_by_any_number_of_threads(monkeypatch):
    rows = []
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(320, 320) for _ in range(4)))  # more than is left to one thread
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with gradwatch.watch(model, optimizer, schedule=SCHEDULE) as monitor:
            for _ in range(20):
                usual(0, model, optimizer, monitor, torch.randn(8, 320), torch.randint(0, 320, (8,)))
            assert monitor._full_path.fast_path.native.filled, "no step was plain"
            rows.append(monitor.history.param.rows()[1])

    np.testing.assert_array_equal(rows[0], rows[1])
