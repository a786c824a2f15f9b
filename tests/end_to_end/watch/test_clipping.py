"""Norms are those of the loss, however a loop clips by torch's functions, and without a further call."""

import gc

import numpy as np
import pytest
import torch
from end_to_end.watch.loops import batches, loss_of, make
from torch import nn
from torch.nn.utils import clip_grad, clip_grad_norm_, clip_grad_value_

import gradwatch
from gradwatch.monitor import Schedule
from gradwatch.monitor.readings.optimizer_tracker import OptimizerTracker
from gradwatch.probe.gradients import clip_calls

LIMIT, STEPS = 0.05, 24
SCHEDULE = Schedule(updates=10, activations=0, histograms=0, budget=0)
CLOSURES = [function.__closure__[0].cell_contents for function in (clip_grad._clip_grads_with_norm_, clip_grad_value_)]


def clip_norm(params):
    clip_grad_norm_(params, LIMIT)


def clip_loosely(params):
    clip_grad_norm_((p for p in params), 1e6)


def clip_values(params):
    clip_grad_value_(params, 1e-3)


def clip_each(params):
    for param in params:
        clip_grad_norm_(param, LIMIT, norm_type=1)


def clip_two_parts(params):
    clip_grad_norm_(params[:2], LIMIT)
    clip_grad_norm_(params[2:], 2 * LIMIT)


def clip_one_part(params):
    clip_grad_norm_(params[2:], LIMIT)


def clip_values_and_norm(params):
    clip_grad_value_(params, 1e-2)
    clip_grad_norm_(params, LIMIT)


def clip_and_add_noise(params):
    clip_grad_norm_(params, LIMIT)
    for param in params:
        param.grad.add_(torch.full_like(param.grad, 1e-3))


def clip_by_a_known_norm(params):
    clip_grad._clip_grads_with_norm_(params, LIMIT, torch.tensor(2.0))


CLIPS = [
    clip_norm,
    clip_loosely,
    clip_values,
    clip_each,
    clip_two_parts,
    clip_one_part,
    clip_values_and_norm,
    clip_and_add_noise,
    clip_by_a_known_norm,
]


def norms_of(params):
    return [0.0 if p.grad is None else p.grad.double().norm().item() for p in params]


def train(clip, *, watched=True, monitor_clips=False, **options):
    """Return the history, the norms before clipping and after it of each step, and the weights."""
    torch.manual_seed(0)
    model = make()
    params = [*model.parameters()]
    optimizer = torch.optim.AdamW(params, lr=1e-2)
    before, after = [], []
    monitor = gradwatch.watch(model, optimizer, schedule=SCHEDULE, on_finding=None, **options) if watched else None
    for x, y in batches(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        before.append(norms_of(params))
        if monitor_clips:
            monitor.observe()
        clip(params)
        after.append(np.linalg.norm(norms_of(params)))
        optimizer.step()
        if monitor:
            monitor.step(loss)
    if monitor:
        monitor.close()
    return monitor and monitor.history, np.array(before), np.array(after), params


@pytest.mark.parametrize("is_fast", [True, False])
@pytest.mark.parametrize("clip", CLIPS)
def test_what_is_read_is_the_gradient_of_the_loss_and_the_clipped_norm(clip, is_fast, monkeypatch):
    if not is_fast:
        monkeypatch.setattr(OptimizerTracker, "fast_path", lambda *_, **__: None)

    history, before_TL, after_T, _ = train(clip)

    np.testing.assert_allclose(history["grad.l2"], before_TL, rtol=1e-6)
    np.testing.assert_allclose(history["grad_norm.before_clip"], np.linalg.norm(before_TL, axis=1), rtol=1e-6)
    np.testing.assert_allclose(history["grad_norm.after_clip"], after_T, rtol=1e-6)


@pytest.mark.parametrize("clip", CLIPS)
def test_a_noticed_reading_is_the_one_of_observe_to_the_bit(clip):
    noticed, *_ = train(clip)
    observed, *_ = train(clip, monitor_clips=True)

    for name in ("grad.l2", "grad.absmax", "grad.mean", "grad.std", "grad.zero_frac", "grad_norm.before_clip"):
        np.testing.assert_array_equal(noticed[name], observed[name], err_msg=name)


@pytest.mark.parametrize("clip", CLIPS)
def test_the_training_does_not_change(clip):
    *_, watched = train(clip)
    *_, plain = train(clip, watched=False)

    assert all(torch.equal(a, b) for a, b in zip(watched, plain, strict=True))


def loop(update, *, make_optimizer=lambda params: torch.optim.SGD(params, lr=0.05), **options):
    torch.manual_seed(0)
    model, before = make(), []
    params = [*model.parameters()]
    optimizer = make_optimizer(params)
    with gradwatch.watch(model, optimizer, schedule=SCHEDULE, on_finding=None, **options) as monitor:
        for x, y in batches(STEPS):
            before.append(update(model, params, optimizer, monitor, x, y))
    return monitor.history, np.array(before)


def test_gradients_under_a_scaler_are_read_unscaled():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)

    def update(model, params, optimizer, monitor, x, y):
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        before = norms_of(params)
        clip_norm(params)
        scaler.step(optimizer)
        scaler.update()
        monitor.step(loss)
        return before

    history, before_TL = loop(update, scaler=scaler)

    np.testing.assert_allclose(history["grad.l2"], before_TL, rtol=1e-6)
    np.testing.assert_allclose(history["grad_norm.after_clip"], LIMIT, rtol=1e-3)


@pytest.mark.parametrize("clips_each", [True, False])
def test_of_micro_batches_the_last_clipping_counts(clips_each):
    def update(model, params, optimizer, monitor, x, y):
        optimizer.zero_grad()
        for i, (xs, ys) in enumerate(zip(x.split(4), y.split(4), strict=True)):
            loss = loss_of(model, xs, ys)
            loss.backward()
            before = norms_of(params)
            if clips_each or i == 2:
                clip_norm(params)
        optimizer.step()
        monitor.step(loss)
        return before

    history, before_TL = loop(update)

    np.testing.assert_allclose(history["grad.l2"], before_TL, rtol=1e-6)


def test_clipping_inside_a_closure_is_noticed():
    def update(model, params, optimizer, monitor, x, y):
        before = []

        def closure():
            optimizer.zero_grad()
            loss = loss_of(model, x, y)
            loss.backward()
            before[:] = norms_of(params)
            clip_norm(params)
            return loss

        monitor.step(optimizer.step(closure))
        return before

    history, before_TL = loop(update)

    np.testing.assert_allclose(history["grad.l2"], before_TL, rtol=1e-6)
    np.testing.assert_allclose(history["grad_norm.after_clip"], LIMIT, rtol=1e-3)


@pytest.mark.parametrize("together", [True, False])
def test_several_optimizers_are_clipped_together_or_one_by_one(together):
    def make_optimizers(params):
        return [torch.optim.SGD(params[:2], lr=0.05), torch.optim.AdamW(params[2:], lr=1e-3)]

    after = []

    def update(model, params, optimizers, monitor, x, y):
        model.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        before = norms_of(params)
        if together:
            clip_norm(params)
        for optimizer, own in zip(optimizers, (params[:2], params[2:]), strict=True):
            if not together:
                clip_norm(own)
            optimizer.step()
        after.append(np.linalg.norm(norms_of(params)))
        monitor.step(loss)
        return before

    history, before_TL = loop(update, make_optimizer=make_optimizers)

    np.testing.assert_allclose(history["grad.l2"], before_TL, rtol=1e-6)
    np.testing.assert_allclose(history["grad_norm.after_clip"], after, rtol=1e-6)


def test_an_update_that_is_left_out_after_clipping_is_recorded_as_skipped():
    def update(model, params, optimizer, monitor, x, y):
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        before = norms_of(params)
        clip_norm(params)
        if monitor.next_step != 15:
            optimizer.step()
        monitor.step(loss)
        return before

    history, before_TL = loop(update)

    assert np.flatnonzero(history["skipped"]).tolist() == [15]
    np.testing.assert_allclose(history["grad.l2"], before_TL, rtol=1e-6)


@pytest.mark.parametrize("is_fast", [True, False])
@pytest.mark.parametrize("is_last", [True, False])
@pytest.mark.parametrize("clip", [clip_norm, clip_values, clip_each])
def test_clipping_after_the_update_changes_no_norm(clip, is_last, is_fast, monkeypatch):
    if not is_fast:
        monkeypatch.setattr(OptimizerTracker, "fast_path", lambda *args, **kwargs: None)
    model, norms = make(), []
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, lr=0.05)
    with gradwatch.watch(model, optimizer, schedule=SCHEDULE, on_finding=None) as monitor:
        for x, y in batches(STEPS):
            optimizer.zero_grad()
            loss = loss_of(model, x, y)
            loss.backward()
            norms.append(torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in params])).item())
            optimizer.step()
            if not is_last:
                clip(params)
            monitor.step(loss)
            if is_last:
                clip(params)

    # the monitor knows of the calls from the first one on, and of the updates from the next row on
    for name in ("grad_norm.before_clip", "grad_norm.after_clip"):
        np.testing.assert_allclose(monitor.history[name][3:], norms[3:], rtol=1e-5)
    assert not optimizer._optimizer_step_pre_hooks


def bodies():
    return [function.__closure__[0].cell_contents for function in (clip_grad._clip_grads_with_norm_, clip_grad_value_)]


@pytest.fixture
def no_listener(monkeypatch):
    """Begin without the monitors that other tests have left open."""
    for listeners in clip_calls.CLIP_LISTENERS:
        listeners._restore()
        monkeypatch.setattr(listeners, "_references", [])


@pytest.mark.usefixtures("no_listener")
def test_torch_is_restored_when_the_last_monitor_ends():
    model = make()
    watch = lambda: gradwatch.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), on_finding=None)  # noqa: E731
    first, second = watch(), watch()
    first.close()
    assert bodies() != CLOSURES

    second.detach()

    assert bodies() == CLOSURES


class Listener:
    """Listens to nothing in particular."""

    def before_clip(self, params):
        pass

    def after_clip(self, params, factor):
        pass


@pytest.mark.usefixtures("no_listener")
def test_torch_is_restored_by_the_first_clipping_after_a_listener_was_discarded():
    listener = Listener()
    clip_calls.listen(listener)
    del listener
    gc.collect()
    assert bodies() != CLOSURES
    param = nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2)

    clip_norm([param])

    np.testing.assert_allclose(param.grad.norm(), LIMIT, rtol=1e-4)
    assert bodies()[0] == CLOSURES[0]


def test_a_function_that_replaces_torchs_is_called_and_kept(monkeypatch):
    calls = []

    def own(parameters, max_norm):
        calls.append(max_norm)
        return clip_grad_norm_(parameters, max_norm)

    monkeypatch.setattr(nn.utils, "clip_grad_norm_", own)

    history, before_TL, *_ = train(lambda params: nn.utils.clip_grad_norm_(params, LIMIT))

    assert calls == [LIMIT] * STEPS
    assert nn.utils.clip_grad_norm_ is own
    np.testing.assert_allclose(history["grad.l2"], before_TL, rtol=1e-6)


def test_what_raises_in_the_reading_reaches_no_loop(monkeypatch):
    from gradwatch.monitor.readings.clip_reader import ClipReader

    monkeypatch.setattr(ClipReader, "_parts", lambda *_: 1 / 0)

    with pytest.warns(RuntimeWarning, match="the reading before clipping failed"):
        history, _, after_T, _ = train(clip_norm)

    np.testing.assert_allclose(history["grad_norm.after_clip"], after_T, rtol=1e-6)
