"""A row per optimizer step, with the numbers of the loss, whatever the loop clears, clips, scales or leaves out."""

import contextlib
import copy
import math

import numpy as np
import pytest
import torch
from end_to_end.watch.loops import (
    EVERY,
    STEPS,
    batches,
    clear_before_recording_in_place,
    clear_first,
    clear_last,
    hand_over_norm,
    loss_of,
    make,
    observe_and_clip,
    observe_and_clip_in_a_closure,
    record,
)
from torch import nn

import gradwatch


@pytest.mark.parametrize(
    "update",
    [
        clear_last,
        clear_before_recording_in_place,
        clear_first,
        observe_and_clip,
        observe_and_clip_in_a_closure,
        hand_over_norm,
    ],
)
def test_gradients_are_those_of_the_loss_wherever_the_loop_clears_and_clips(update):
    history, expected = record(update)

    np.testing.assert_allclose(history["grad.l2"], expected, rtol=1e-5)
    total_T = np.sqrt((expected**2).sum(axis=1))
    np.testing.assert_allclose(history["grad_norm.before_clip"], total_T, rtol=1e-5)
    clips = update in (observe_and_clip, observe_and_clip_in_a_closure, hand_over_norm)
    after = 0.05 if clips else total_T
    np.testing.assert_allclose(history["grad_norm.after_clip"], after, rtol=1e-4)
    assert not history["skipped"].any()


def test_a_norm_below_the_limit_scales_nothing():
    def update(model, optimizer, monitor, loss):
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e6)
        optimizer.step()
        monitor.step(loss, grad_norm=norm)

    history, _ = record(update)

    np.testing.assert_array_equal(history["grad.l2"], record(clear_first)[0]["grad.l2"])


@pytest.mark.parametrize("late", [False, True])
def test_the_learning_rate_is_that_of_the_update(late):
    schedules = []

    def update(model, optimizer, monitor, loss):
        if not schedules:
            schedules.append(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if late:
            monitor.step(loss)
        schedules[0].step()
        if not late:
            monitor.step(loss)

    history, _ = record(update)

    np.testing.assert_allclose(history["lr.0"], 0.1 * 0.5 ** np.arange(STEPS))


def test_learning_rates_are_found_after_a_checkpoint_is_loaded_into_the_optimizer():
    def update(model, optimizer, monitor, loss):
        if monitor.next_step == 2:
            state = copy.deepcopy(optimizer.state_dict())
            state["param_groups"][0]["lr"] = 0.025
            optimizer.load_state_dict(state)
        clear_last(model, optimizer, monitor, loss)

    history, _ = record(update)

    np.testing.assert_allclose(history["lr.0"], [0.1, 0.1, *[0.025] * (STEPS - 2)])


def test_a_learning_rate_may_be_a_tensor():
    history, _ = record(clear_last, make_optimizer=lambda m: torch.optim.Adam(m.parameters(), lr=torch.tensor(0.01)))

    np.testing.assert_allclose(history["lr.0"], 0.01, rtol=1e-6)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("clears_first", [False, True])
def test_a_scaler_is_seen_through_and_its_skips_are_rows(fused, unscale, clears_first):
    model = make()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
    expected, scales = [], []
    with gradwatch.watch(model, optimizer, scaler=scaler, schedule=EVERY) as monitor:
        for step, (x, y) in enumerate(batches()):
            if clears_first:
                optimizer.zero_grad()
            loss = loss_of(model, x, y)
            expected.append([g.norm().item() for g in torch.autograd.grad(loss, model.parameters(), retain_graph=True)])
            scaler.scale(loss).backward()
            if step == 3:
                model[0].weight.grad[0, 0] = float("inf")
            scales.append(scaler.get_scale())
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            if not clears_first:
                optimizer.zero_grad()
            monitor.step(loss)
    history = monitor.history

    assert history["skipped"].tolist() == [0, 0, 0, 1, 0, 0]
    assert history["loss_scale"].tolist() == scales
    fine = [0, 1, 2, 4, 5]
    np.testing.assert_allclose(history["grad.l2"][fine], np.array(expected)[fine], rtol=1e-5)
    nonfinite = history["grad.nonfinite"][3, 0]
    if clears_first or fused:
        assert nonfinite == 1, "the gradient that was skipped could still be read"
    else:
        assert np.isnan(nonfinite), "it was cleared: missing, not zero"
    assert np.isnan(history["update.ratio"][3]).all(), "nothing was updated"


@pytest.mark.parametrize("set_to_none", [False, True])
def test_a_skip_by_the_loop_itself_is_a_row_without_what_was_cleared(set_to_none):
    def update(model, optimizer, monitor, loss):
        loss.backward()
        if monitor.next_step != 2:
            optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        monitor.step(loss)

    history, _ = record(update)

    assert history["skipped"].tolist() == [0, 0, 1, 0, 0, 0]
    assert np.isnan(history["grad.l2"][2]).all()
    assert np.isnan(history["grad_norm.before_clip"][2])
    assert np.isfinite(history["lr.0"][2])


@pytest.mark.parametrize("says_so", [True, False])
def test_calls_for_each_micro_batch_make_one_row_per_update(says_so):
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"accumulate": 4} if says_so else {}
    losses = []
    says = contextlib.nullcontext() if says_so else pytest.warns(RuntimeWarning, match="runs once per 4 calls")
    with says, gradwatch.watch(model, optimizer, schedule=EVERY, **options) as monitor:
        for i, (x, y) in enumerate(batches(40)):
            loss = loss_of(model, x, y)
            loss.backward()
            if i % 4 == 3:
                optimizer.step()
            monitor.step(loss, batch=x)
            if i % 4 == 3:
                optimizer.zero_grad()
            losses.append(loss.item())
    history = monitor.history

    learned = slice(None) if says_so else slice(8, None)
    assert not history["skipped"][learned].any()
    means = np.array(losses).reshape(-1, 4).mean(axis=1)
    np.testing.assert_allclose(history["loss"][learned], means if says_so else means[2:], rtol=1e-6)


def test_a_second_call_for_the_same_update_is_not_an_update():
    def update(model, optimizer, monitor, loss):
        clear_first(model, optimizer, monitor, loss)
        if monitor.next_step == 3:
            monitor.step(loss)

    history, _ = record(update)

    assert history["skipped"].tolist() == [0, 0, 0, 1, 0, 0, 0]


def test_calls_that_are_left_out_lose_rows_and_nothing_else():
    def update(model, optimizer, monitor, loss):
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
        if len(seen) % 3 == 0:
            monitor.step(loss)

    seen = []

    history, expected = record(update)

    assert history["loss"].tolist() == seen[2::3]
    np.testing.assert_allclose(history["grad.l2"], expected[2::3], rtol=1e-5)


def test_a_loop_that_records_before_it_steps_has_the_gradients_of_the_update_before():
    def update(model, optimizer, monitor, loss):
        optimizer.zero_grad()
        loss.backward()
        monitor.step(loss)
        optimizer.step()

    history, expected = record(update)

    np.testing.assert_allclose(history["grad.l2"], expected[[0, *range(STEPS - 1)]], rtol=1e-5)
    assert history["skipped"].tolist() == [1, 0, 0, 0, 0, 0]


def test_losses_that_stop_coming_are_missing_and_a_nan_that_is_handed_over_is_not():
    def losses_of(*values):
        torch.manual_seed(0)
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        with gradwatch.watch(model, optimizer) as monitor:
            for value in values:
                model(torch.ones(4, 6)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                monitor.step(value)
        return [(f.step, f.message) for f in monitor.findings() if f.kind == "non-finite"]

    assert losses_of(*[1.0] * 5, *[None] * 5) == []
    harmless = "the loss became NaN, and every gradient was finite: no weight was harmed"
    assert losses_of(*[1.0] * 5, math.nan, 1.0) == [(5, harmless)]
    assert losses_of(*[math.nan] * 3) == [(0, harmless)], "finite gradients do not make it missing"


@pytest.mark.parametrize(("value", "event"), [(math.nan, "batch-nonfinite"), (2.0, "batch-finite")])
def test_inputs_are_looked_at_once_when_the_loss_is_not_finite(value, event):
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = {"x": [torch.arange(12.0).reshape(4, 3), torch.tensor([1.0, value])]}
    with gradwatch.watch(model, optimizer) as monitor:
        for loss in (1.0, math.inf, math.inf):
            monitor.step(loss, batch=inputs)

    assert [(e.kind, e.step) for e in monitor.history.events if e.kind.startswith("batch-")] == [(event, 1)]
