"""A watched optimizer gives the monitor the history that torch's fused one has, without a read of its own."""

import numpy as np
import pytest
import torch
from torch import nn

import gradwatch
from gradwatch import catalogue, optim
from gradwatch.monitor import Schedule
from gradwatch.probe.device import backend as kernels
from gradwatch.probe.gradients.statistics import GradientProbe

pytestmark = pytest.mark.skipif(kernels.select_backend() is None, reason="the extension is not built")
EVERY = Schedule(updates=2, activations=0, histograms=3)
RUN = ["loss", "loss_scale", "skipped", "grad_norm.before_clip", "grad_norm.after_clip", "lr.0"]


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def batches(steps=6):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        # Neither side has mean 0, and the loss has no softmax, whose gradients add up to 0: a mean that cancels is
        # rounding alone, and the two optimizers round differently if torch has no fused multiply-add.
        yield 1 + torch.randn(12, 6, generator=generator), 1 + torch.randn(12, 3, generator=generator)


def loss_of(model, x, y):
    return nn.functional.mse_loss(model(x), y)


# Each loop trains with a class of optimizer, and returns the monitor.


def plain(kind, **options):
    model = make()
    optimizer = kind(model.parameters(), lr=1e-2, **options)
    with gradwatch.watch(model, optimizer, schedule=EVERY) as monitor:
        for x, y in batches():
            loss = loss_of(model, x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss)
    return monitor


def clipping(kind, *, observes, **options):
    model = make()
    optimizer = kind(model.parameters(), lr=1e-2, **options)
    with gradwatch.watch(model, optimizer, schedule=EVERY) as monitor:
        for x, y in batches():
            optimizer.zero_grad()
            loss = loss_of(model, x, y)
            loss.backward()
            if observes:
                monitor.observe()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            monitor.step(loss, grad_norm=None if observes else norm)
    return monitor


def observed_and_clipped(kind, **options):
    return clipping(kind, observes=True, **options)


def clipped_and_told(kind, **options):
    return clipping(kind, observes=False, **options)


def scaled(kind, **options):
    model = make()
    optimizer = kind(model.parameters(), lr=1e-2, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with gradwatch.watch(model, optimizer, scaler=scaler, schedule=EVERY) as monitor:
        for i, (x, y) in enumerate(batches()):
            optimizer.zero_grad()
            loss = loss_of(model, x, y) * (float("inf") if i == 3 else 1)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            monitor.step(loss)
    return monitor


def closing(kind, *, observes, **options):
    model = make()
    optimizer = kind(model.parameters(), lr=1e-2, **options)
    with gradwatch.watch(model, optimizer, schedule=EVERY) as monitor:
        for x, y in batches():

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = loss_of(model, x, y)
                loss.backward()
                if observes:
                    monitor.observe(optimizer)
                    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                return loss

            monitor.step(optimizer.step(closure))
    return monitor


def by_closure(kind, **options):
    return closing(kind, observes=False, **options)


def observed_and_clipped_by_closure(kind, **options):
    return closing(kind, observes=True, **options)


def two_optimizers(kind, **options):
    models = {"one": make(), "two": make()}
    optimizers = [kind(model.parameters(), lr=1e-2, **options) for model in models.values()]
    with gradwatch.watch(models, optimizers, schedule=EVERY) as monitor:
        for x, y in batches():
            total = 0.0
            for model, optimizer in zip(models.values(), optimizers, strict=True):
                optimizer.zero_grad()
                loss = loss_of(model, x, y)
                loss.backward()
                optimizer.step()
                total += loss.item()
            monitor.step(total)
    return monitor


def frozen_part(kind, **options):
    model = make()
    model[0].requires_grad_(False)
    optimizer = kind(model[2:].parameters(), lr=1e-2, **options)
    with gradwatch.watch(model, optimizer, schedule=EVERY) as monitor:
        for x, y in batches():
            optimizer.zero_grad()
            loss = loss_of(model, x, y)
            loss.backward()
            optimizer.step()
            monitor.step(loss)
    return monitor


LOOPS = [
    plain,
    observed_and_clipped,
    clipped_and_told,
    scaled,
    by_closure,
    observed_and_clipped_by_closure,
    two_optimizers,
    frozen_part,
]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_the_history_is_the_same(loop, name):
    expected = loop(getattr(torch.optim, name), fused=True).history
    history = loop(getattr(optim, name)).history

    assert history.step == expected.step
    for statistic in catalogue.PARAM_NAMES:
        np.testing.assert_allclose(
            history[statistic], expected[statistic], rtol=1e-5, atol=1e-9, err_msg=statistic, equal_nan=True
        )
        assert np.isfinite(history[statistic]).any(), f"{statistic} was measured"
    for statistic in RUN:
        np.testing.assert_allclose(history[statistic], expected[statistic], rtol=1e-5, err_msg=statistic)
    assert history.histograms.keys() == expected.histograms.keys()
    for i, (seen, k) in history.histograms.items():
        theirs, place = expected.histograms[i]
        assert seen.step == theirs.step
        assert seen.grad_KB[k].sum() == theirs.grad_KB[place].sum()


@pytest.mark.parametrize("loop", [plain, scaled, by_closure], ids=lambda loop: loop.__name__)
def test_gradients_are_read_by_the_step_alone(loop, monkeypatch):
    def read(*_, **__):
        raise AssertionError("the probe was asked")

    monkeypatch.setattr(GradientProbe, "read", read)

    assert np.isfinite(loop(optim.AdamW).history["grad.std"][0]).all()


def test_an_optimizer_that_is_watched_twice_is_read_for_the_second():
    model = make()
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    with (
        gradwatch.watch(model, optimizer, schedule=EVERY) as first,
        gradwatch.watch(model, optimizer, schedule=EVERY) as second,
    ):
        for x, y in batches():
            loss = loss_of(model, x, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            first.step(loss)
            second.step(loss)

    for statistic in ("grad.l2", "update.ratio"):
        np.testing.assert_array_equal(first.history[statistic], second.history[statistic], err_msg=statistic)


def test_once_detached_nothing_is_written_and_another_may_watch():
    model = make()
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)

    gradwatch.watch(model, optimizer).close()

    assert optimizer.can_watch([*model.parameters()])
    assert optimizer.gradients_SL is None
