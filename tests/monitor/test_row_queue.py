"""Rows that arrive some steps later are those that are waited for, and nothing is waited for on the way."""

import functools
import math

import numpy as np
import pytest
import torch
from torch import nn

import gradwatch
from gradwatch import catalogue
from gradwatch.monitor import Monitor, Schedule, host_stats, wiring
from gradwatch.monitor.readings import optimizer_tracker, parameter_readings, update_reader
from gradwatch.probe.device import sync, transfer_queue

LATENCY = 3  # steps until a row arrives
EVERY = Schedule(updates=2, activations=2, histograms=3, budget=0)
STEPS = 12


class Slow(sync.HostTransfer):
    """A parcel that takes its time, as one of a GPU does."""

    newest = 0

    def __init__(self, *args):
        super().__init__(*args)
        Slow.newest += 1
        self.number = Slow.newest

    @property
    def is_ready(self):
        return Slow.newest - self.number >= LATENCY


@pytest.fixture
def slow(monkeypatch):
    """Play a device that is some steps behind."""
    monkeypatch.setattr(wiring, "Monitor", functools.partial(Monitor, deferred=True))
    monkeypatch.setattr(transfer_queue, "HostTransfer", Slow)
    monkeypatch.setattr(sync, "is_on_host", lambda _: False)


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def batches():
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        yield torch.randn(12, 6, generator=generator), torch.randint(3, (12,), generator=generator)


def loss_of(model, x, y):
    return nn.functional.cross_entropy(model(x), y)


def plain(kind, *, clips=False, observes=False, spoilt_at=None):
    model = make()
    optimizer = kind(model.parameters(), lr=1e-2)
    with gradwatch.watch(model, optimizer, schedule=EVERY) as watcher:
        for i, (x, y) in enumerate(batches()):
            optimizer.zero_grad()
            loss = loss_of(model, x, y) * (math.nan if i == spoilt_at else 1)
            loss.backward()
            if observes:
                watcher.observe()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1) if clips else None
            optimizer.step()
            watcher.step(loss, batch=x, grad_norm=None if observes else norm)
    return watcher


def scaled(kind, **options):
    model = make()
    optimizer = kind(model.parameters(), lr=1e-2, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    with gradwatch.watch(model, optimizer, scaler=scaler, schedule=EVERY) as watcher:
        for i, (x, y) in enumerate(batches()):
            optimizer.zero_grad()
            loss = loss_of(model, x, y) * (math.inf if i == 5 else 1)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            watcher.step(loss, batch=x)
    return watcher


def by_closure(kind, *, observes=False):
    model = make()
    optimizer = kind(model.parameters(), lr=1e-2)
    with gradwatch.watch(model, optimizer, schedule=EVERY) as watcher:
        for x, y in batches():

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = loss_of(model, x, y)
                loss.backward()
                if observes:
                    watcher.observe()
                    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                return loss

            watcher.step(optimizer.step(closure), batch=x)
    return watcher


def accumulated(kind):
    model = make()
    optimizer = kind(model.parameters(), lr=1e-2)
    with gradwatch.watch(model, optimizer, schedule=EVERY, accumulate=3) as watcher:
        for i, (x, y) in enumerate(batches()):
            loss = loss_of(model, x, y)
            (loss / 3).backward()
            if i % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
            watcher.step(loss, batch=x)
    return watcher


def two_optimizers(kind):
    models = {"one": make(), "two": make()}
    optimizers = [kind(model.parameters(), lr=1e-2) for model in models.values()]
    with gradwatch.watch(models, optimizers, schedule=EVERY) as watcher:
        for x, y in batches():
            losses = []
            for model, optimizer in zip(models.values(), optimizers, strict=True):
                optimizer.zero_grad()
                losses.append(loss_of(model, x, y))
                losses[-1].backward()
                optimizer.step()
            watcher.step(sum(losses), batch=x)
    return watcher


LOOPS = {
    "plain": plain,
    "clipped and told": functools.partial(plain, clips=True),
    "observed and clipped": functools.partial(plain, clips=True, observes=True),
    "spoilt": functools.partial(plain, spoilt_at=7),
    "scaled": scaled,
    "by closure": by_closure,
    "observed and clipped by closure": functools.partial(by_closure, observes=True),
    "accumulated": accumulated,
    "two optimizers": two_optimizers,
}
KINDS = {"SGD": torch.optim.SGD, "fused AdamW": functools.partial(torch.optim.AdamW, fused=True)}


def same(history, expected):
    assert history.step == expected.step >= 3
    for statistic in (*catalogue.PARAM_NAMES, *catalogue.ACT_NAMES, *expected.run.statistics):
        if statistic not in catalogue.CLOCK_NAMES - {"data_wait_ms"}:
            np.testing.assert_array_equal(history.steps(statistic), expected.steps(statistic))
            np.testing.assert_allclose(
                history[statistic], expected[statistic], rtol=1e-5, atol=1e-9, err_msg=statistic, equal_nan=True
            )
    assert counted(history) == counted(expected)


def counted(history):
    """Return of each parameter when its newest histograms were made, and of how many values."""
    newest = sorted(history.histograms.items())
    return [(i, seen.step, seen.grad_KB[k].sum(), seen.weight_KB[k].sum()) for i, (seen, k) in newest]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loop", LOOPS)
def test_the_history_is_the_one_that_is_waited_for(loop, kind, request):
    expected = LOOPS[loop](KINDS[kind])
    request.getfixturevalue("slow")

    got = LOOPS[loop](KINDS[kind])

    same(got.history, expected.history)
    for ours, theirs in zip(got.history.findings, expected.history.findings, strict=True):
        assert (ours.kind, ours.layer, ours.step) == (theirs.kind, theirs.layer, theirs.step)
    noted = [(event.kind, event.step, event.layer) for event in expected.history.events]
    assert sorted(map(str, noted)) == sorted(str((e.kind, e.step, e.layer)) for e in got.history.events)


@pytest.mark.parametrize("loop", ["plain", "clipped and told", "scaled", "two optimizers"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "SGD"])
@pytest.mark.filterwarnings("error")
def test_no_step_looks_at_what_the_device_has_not_computed(loop, kind, slow, monkeypatch):
    def wait(*_):
        raise AssertionError("the host would wait for the device")

    monkeypatch.setattr(optimizer_tracker, "to_array", wait)
    monkeypatch.setattr(host_stats, "to_number", wait)
    for name in ("to_float", "to_ints"):
        monkeypatch.setattr(sync, name, wait)
        monkeypatch.setattr(optimizer_tracker, name, wait, raising=False)

    history = LOOPS[loop](KINDS[kind]).history

    assert np.isfinite(history["grad.l2"][:5]).all(), "and yet all is read"


def test_findings_wait_for_what_is_under_way(slow):
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    watcher = gradwatch.watch(model, optimizer, schedule=EVERY)
    for x, y in batches():
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        watcher.step(loss, batch=x)
        assert watcher.next_step == watcher._full_path._counter.step

    assert len(watcher._rows) == LATENCY + 1, "it looks before each step"
    watcher.findings()

    assert len(watcher._rows) == 0
    assert watcher.history.step == STEPS - 1
    watcher.close()


@pytest.mark.parametrize("kind", KINDS)
def test_replays_of_a_captured_step_make_rows_of_what_they_compute(kind, slow, monkeypatch):
    model = make()
    optimizer = KINDS[kind](model.parameters(), lr=1e-2)
    with gradwatch.watch(model, optimizer, schedule=EVERY) as watcher:
        (x, y), *_ = batches()
        loss_of(model, x, y).backward()
        for module in (update_reader, optimizer_tracker, parameter_readings):
            monkeypatch.setattr(module, "is_capturing", lambda _: True)
        optimizer.step()
        for module in (update_reader, optimizer_tracker, parameter_readings):
            monkeypatch.setattr(module, "is_capturing", lambda _: False)
        (captured,) = [t._captured for t in watcher._collector._trackers]
        read_SP = captured["grad"].clone()
        for replay in range(4):
            captured["grad"].copy_(read_SP * (replay + 1))
            watcher.step(torch.tensor(float(replay)))

    history = watcher.history
    expected_TL = read_SP[0].numpy() * np.arange(1, 5)[:, None]
    np.testing.assert_allclose(history["grad.l2"], expected_TL, rtol=1e-6)
    np.testing.assert_allclose(history["grad_norm.before_clip"], np.linalg.norm(expected_TL, axis=1), rtol=1e-6)
    assert history["loss"].tolist() == [0, 1, 2, 3]
    assert not history["skipped"].any()
    assert "update" not in captured, "a copy of the weights is no part of a graph"
    assert "counts" not in captured


def test_rows_arrive_in_order_and_the_oldest_is_waited_for_where_too_many_are_under_way(monkeypatch):
    monkeypatch.setattr(transfer_queue, "HostTransfer", type("Never", (sync.HostTransfer,), {"is_ready": False}))
    queue, seen = transfer_queue.TransferQueue(), []

    for i in range(transfer_queue.MAX_IN_FLIGHT + 3):
        value = torch.tensor([i])
        queue.send({"x": value}, lambda values: seen.append(int(values["x"][0])))
        value += 100  # it has been sent as it was
        queue.drain()

    assert seen == [0, 1, 2]
    queue.drain(wait=True)
    assert seen == [*range(transfer_queue.MAX_IN_FLIGHT + 3)]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool]
)
def test_a_parcel_holds_what_was_put_into_it(dtype):
    tensors = {
        "a": torch.arange(6).reshape(2, 3).to(dtype),
        "b": torch.tensor(1.5).to(dtype),
        "c": torch.ones(0).to(dtype),
    }

    values = sync.HostTransfer(tensors | {"odd": torch.ones(3, dtype=torch.uint8)}).values()

    for name, tensor in tensors.items():
        assert values[name].shape == tuple(tensor.shape)
        np.testing.assert_array_equal(values[name].astype(np.float64), tensor.double().numpy())
