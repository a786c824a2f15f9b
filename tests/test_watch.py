"""`gradwatch.watch` in loops that nobody wrote for it: it changes nothing, and its numbers are those of the loss."""

import contextlib
import copy
import gc
import math
import random
import subprocess
import sys
import warnings
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradwatch
from gradwatch.errors import GradwatchError
from gradwatch.history import disk
from gradwatch.monitor import Schedule

EVERY = Schedule(updates=1, activations=1, histograms=3)
STEPS = 6


def make(seed=0, dropout=0.0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def batches(steps=STEPS, samples=12):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield torch.randn(samples, 6, generator=generator), torch.randint(3, (samples,), generator=generator)


def loss_of(model, x, y):
    return nn.functional.cross_entropy(model(x), y)


def norms(params):
    """The norms that the history must hold."""
    return np.array([float("nan") if p.grad is None else p.grad.double().norm().item() for p in params])


# Every loop trains with its watch as a loop would, or with none, and returns losses and what it trained.


def plain(watch):
    model = make(dropout=0.3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    with watch(model, optimizer) as monitor:
        for x, y in batches():
            loss = loss_of(model, x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss, batch=(x, y))
            losses.append(loss.item())
    return losses, [model]


def scaled_and_clipped(watch):
    model = make(dropout=0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=3)
    losses = []
    with watch(model, optimizer, scaler=scaler) as monitor:
        for x, y in batches(12):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = loss_of(model, x, y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            monitor.observe()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            monitor.step(loss)
            losses.append(loss.item())
    return losses, [model]


def fused_and_scaled(watch):
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    losses = []
    with watch(model, optimizer, scaler=scaler) as monitor:
        for x, y in batches():
            loss = loss_of(model, x, y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            monitor.step(loss)
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, [model]


def compiled(watch):
    torch.compiler.reset()
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-1)
    losses = []
    with watch(model, optimizer) as monitor:
        fast = torch.compile(model, backend="aot_eager")
        for x, y in batches():
            loss = loss_of(fast, x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            monitor.step(loss)
            losses.append(loss.item())
    return losses, [model]


def adversarial(watch):
    generator, critic = make(), make(1)
    opt_g, opt_c = torch.optim.Adam(generator.parameters(), lr=1e-2), torch.optim.RMSprop(critic.parameters(), lr=1e-2)
    losses = []
    with watch({"generator": generator, "critic": critic}, [opt_g, opt_c]) as monitor:
        for x, _ in batches():
            opt_c.zero_grad()
            fake = nn.functional.pad(generator(x), (0, 3))
            (critic(fake.detach()).mean() - critic(x).mean()).backward()
            monitor.observe(opt_c)
            nn.utils.clip_grad_value_(critic.parameters(), 0.01)
            opt_c.step()
            opt_g.zero_grad()
            loss = -critic(fake).mean()
            loss.backward()
            opt_g.step()
            monitor.step(loss)
            losses.append(loss.item())
    return losses, [generator, critic]


def accumulated(watch):
    model = make(dropout=0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-1)
    losses = []
    with watch(model, optimizer, accumulate=3) as monitor:
        for x, y in batches():
            for xs, ys in zip(x.split(4), y.split(4), strict=True):
                loss = loss_of(model, xs, ys) / 3
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss.item() * 3)
            losses.append(loss.item())
    return losses, [model]


def checkpointed(watch):
    model = make(dropout=0.3)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    with watch(model, optimizer) as monitor:
        for x, y in batches():
            hidden = checkpoint(model[:3], x, use_reentrant=False)
            loss = nn.functional.cross_entropy(model[3:](hidden), y)
            loss.backward()
            optimizer.step()
            monitor.step(loss)
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, [model]


def with_closure(watch):
    model = make()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
    losses = []
    with watch(model, optimizer) as monitor:
        for x, y in batches():

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = loss_of(model, x, y)
                loss.backward()
                return loss

            loss = optimizer.step(closure)
            monitor.step(loss)
            losses.append(loss.item())
    return losses, [model]


LOOPS = [plain, scaled_and_clipped, fused_and_scaled, compiled, adversarial, accumulated, checkpointed, with_closure]


class Nothing(contextlib.AbstractContextManager):
    """What the loops call where nothing watches."""

    def __exit__(self, *error):
        return None

    def observe(self, optimizer=None):
        pass

    def step(self, loss, **context):
        pass


@pytest.fixture
def monitors():
    return []


@pytest.fixture
def watch(monitors):
    """Watch everything at every step, and keep the monitor."""

    def attach(*args, **options):
        monitors.append(gradwatch.watch(*args, **options | {"schedule": EVERY}))
        return monitors[-1]

    return attach


def random_state():
    return torch.get_rng_state(), np.random.get_state()[1], random.getstate()


@pytest.mark.parametrize("loop", LOOPS)
def test_watching_changes_neither_losses_nor_weights_nor_random_numbers(loop, watch, monitors):
    random.seed(0)
    np.random.seed(0)
    expected_losses, expected = loop(lambda *args, **options: Nothing())
    expected_state = random_state()
    random.seed(0)
    np.random.seed(0)

    losses, models = loop(watch)

    assert losses == expected_losses
    for found, wanted in zip(models, expected, strict=True):
        for (name, a), b in zip(found.named_parameters(), wanted.parameters(), strict=True):
            assert torch.equal(a, b), name
    found_state = random_state()
    assert torch.equal(found_state[0], expected_state[0]), "torch's random numbers"
    assert np.array_equal(found_state[1], expected_state[1]), "NumPy's random numbers"
    assert found_state[2] == expected_state[2], "Python's random numbers"
    assert monitors[0].history.step == len(losses) - 1, "one row per optimizer step"
    assert not monitors[0].warned, "nothing was switched off"


@pytest.mark.parametrize("loop", [*LOOPS, "raises"])
def test_every_hook_is_gone_afterwards(loop, watch):
    seen = []

    def remember(model, optimizer, **options):
        models = list(model.values()) if isinstance(model, dict) else [model]
        seen.extend([models, optimizer if isinstance(optimizer, list) else [optimizer]])
        return watch(model, optimizer, **options)

    if loop == "raises":
        model = make()
        with pytest.raises(ZeroDivisionError), remember(model, torch.optim.SGD(model.parameters(), lr=0.1)) as monitor:
            1 / 0  # noqa: B018
        assert monitor.history.step == -1
    else:
        loop(remember)

    models, optimizers = seen
    for model in models:
        for name, module in model.named_modules():
            assert not module._forward_hooks, name
            assert not module._forward_pre_hooks, name
        assert all(not p._post_accumulate_grad_hooks for p in model.parameters())
    for optimizer in optimizers:
        assert not optimizer._optimizer_step_pre_hooks
        assert not optimizer._optimizer_step_post_hooks


def record(update, *, steps=STEPS, make_optimizer=None, **options):
    """Train with `update(model, optimizer, monitor, loss)` per step; return the history and norms before each."""
    model = make()
    optimizer = make_optimizer(model) if make_optimizer else torch.optim.SGD(model.parameters(), lr=1e-1)
    expected = []
    with gradwatch.watch(model, optimizer, schedule=EVERY, **options) as monitor:
        for x, y in batches(steps):
            loss = loss_of(model, x, y)
            grads = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            expected.append([g.double().norm().item() for g in grads])
            update(model, optimizer, monitor, loss)
    return monitor.history, np.array(expected)


def clear_last(model, optimizer, monitor, loss):
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    monitor.step(loss)


def clear_before_recording_in_place(model, optimizer, monitor, loss):
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    monitor.step(loss.item())


def clear_first(model, optimizer, monitor, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    monitor.step(loss)


def observe_and_clip(model, optimizer, monitor, loss):
    optimizer.zero_grad()
    loss.backward()
    monitor.observe()
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()
    monitor.step(loss)


def hand_over_norm(model, optimizer, monitor, loss):
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()
    monitor.step(loss, grad_norm=norm)


@pytest.mark.parametrize(
    "update", [clear_last, clear_before_recording_in_place, clear_first, observe_and_clip, hand_over_norm]
)
def test_gradients_are_those_of_the_loss_wherever_the_loop_clears_and_clips(update):
    history, expected = record(update)

    np.testing.assert_allclose(history["grad.l2"], expected, rtol=1e-5)
    total_T = np.sqrt((expected**2).sum(axis=1))
    np.testing.assert_allclose(history["grad_norm.before_clip"], total_T, rtol=1e-5)
    after = 0.05 if update in (observe_and_clip, hand_over_norm) else total_T
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
    says = contextlib.nullcontext() if says_so else pytest.warns(RuntimeWarning, match="once in 4 calls of step")
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


def test_a_gan_has_each_optimizers_gradients_as_they_were_before_its_own_update(monitors, watch):
    expected = {}

    class Spy(torch.optim.SGD):
        def step(self, closure=None):
            expected.setdefault(self.defaults["lr"], []).append(norms(self.param_groups[0]["params"]))

    generator, critic = make(), make(1)
    opt_g, opt_c = Spy(generator.parameters(), lr=0.1), Spy(critic.parameters(), lr=0.2)
    with watch({"g": generator, "c": critic}, [opt_g, opt_c]) as monitor:
        for x, _ in batches():
            fake = nn.functional.pad(generator(x), (0, 3))
            for _ in range(2):
                opt_c.zero_grad()
                (critic(fake.detach()).mean() - critic(x).mean()).backward()
                monitor.observe()  # the generator's gradients are old, and will be read again
                opt_c.step()
            opt_g.zero_grad()
            loss = -critic(fake).mean()
            loss.backward()
            opt_g.step()
            monitor.step(loss)
    history = monitor.history

    found = history["grad.l2"]
    assert history.param.layers[0].startswith("g.")
    np.testing.assert_allclose(found[:, :6], expected[0.1], rtol=1e-5)
    np.testing.assert_allclose(found[:, 6:], expected[0.2][1::2], rtol=1e-5)
    assert (history["lr.0"] == 0.1).all()
    assert (history["lr.1"] == 0.2).all()


def test_two_optimizers_of_one_model_share_one_observation():
    def make_two(model):
        return [torch.optim.SGD(model[:3].parameters(), lr=0.1), torch.optim.Adam(model[3:].parameters(), lr=0.01)]

    def update(model, optimizers, monitor, loss):
        model.zero_grad()
        loss.backward()
        monitor.observe()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        for optimizer in optimizers:
            optimizer.step()
        monitor.step(loss)

    history, expected = record(update, make_optimizer=make_two)

    np.testing.assert_allclose(history["grad.l2"], expected, rtol=1e-5)
    np.testing.assert_allclose(history["grad_norm.after_clip"], 0.01, rtol=1e-3)


def test_a_parameter_in_two_optimizers_is_read_for_both():
    def make_two(model):
        return [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(model[:4].parameters(), lr=0.01)]

    def update(model, optimizers, monitor, loss):
        loss.backward()
        optimizers[monitor.next_step % 2].step()
        model.zero_grad()
        monitor.step(loss)

    history, expected = record(update, make_optimizer=make_two)

    np.testing.assert_allclose(history["grad.l2"][:, :4], expected[:, :4], rtol=1e-5)
    np.testing.assert_allclose(history["grad.l2"][::2, 4:], expected[::2, 4:], rtol=1e-5)


def test_only_the_generator_is_watched_while_the_critic_trains_through_it():
    generator, critic = make(), make(1)
    opt_g, opt_c = torch.optim.SGD(generator.parameters(), lr=0.1), torch.optim.SGD(critic.parameters(), lr=0.1)
    expected = []
    with gradwatch.watch(generator, opt_g) as monitor:
        for x, _ in batches():
            fake = nn.functional.pad(generator(x), (0, 3))
            critic(fake).mean().backward(retain_graph=True)  # reaches the generator
            opt_c.step()
            opt_g.zero_grad()
            opt_c.zero_grad()
            loss = -critic(fake).mean()
            loss.backward()
            expected.append(norms(generator.parameters()))
            opt_g.step()
            monitor.step(loss)

    np.testing.assert_allclose(monitor.history["grad.l2"], expected, rtol=1e-5)


class Odd(nn.Module):
    """Tied, frozen, sparse and complex parameters, a buffer, and one that is never used."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(10, 4, sparse=True)
        self.body = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.body.weight
        self.phase = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
        self.unused = nn.Parameter(torch.ones(2))
        self.absent = nn.Parameter(torch.empty(3, device="meta"))

    def forward(self, tokens):
        hidden = self.norm(self.frozen(self.tied(self.body(self.table(tokens).mean(1)).relu())))
        return (hidden * self.phase).abs().mean()


def test_odd_parameters_have_their_places():
    model = Odd()
    dense = [p for n, p in model.named_parameters() if n not in ("table.weight", "absent")]
    optimizers = [torch.optim.SparseAdam(model.table.parameters(), lr=0.01), torch.optim.SGD(dense, lr=0.01)]
    requires_grad = [p.requires_grad for p in model.parameters()]
    expected = []
    with gradwatch.watch(model, optimizers, schedule=EVERY) as monitor:
        for step in range(4):
            model.train(step != 2)
            loss = model(torch.arange(6).reshape(3, 2) + step % 2)
            loss.backward()
            expected.append(
                [
                    float("nan") if p.grad is None else torch.linalg.vector_norm(p.grad.to_dense()).item()
                    for p in model.parameters()
                ]
            )
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            monitor.step(loss, batch={"tokens": [torch.arange(6), None, "text"]}, val_loss=None)
            assert model.training == (step != 2)
    history = monitor.history

    assert list(history.param.layers) == [name for name, _ in model.named_parameters()]
    np.testing.assert_allclose(history["grad.l2"], expected, rtol=1e-5)
    assert np.isfinite(history["update.ratio"][:, history.param.layers.index("phase")]).all()
    assert [p.requires_grad for p in model.parameters()] == requires_grad
    assert not monitor.warned


def test_parameters_that_come_later_are_told_once_and_left_out():
    def update(model, optimizer, monitor, loss):
        if monitor.next_step in (2, 3):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], "lr": 1.0})
        clear_last(model, optimizer, monitor, loss)

    with pytest.warns(RuntimeWarning, match="1 parameters came to the optimizer after gradwatch attached") as caught:
        history, expected = record(update)

    assert len([w for w in caught if "after gradwatch" in str(w.message)]) == 1
    np.testing.assert_allclose(history["grad.l2"], expected, rtol=1e-5)


def test_a_layer_that_is_unfrozen_later_is_watched():
    model = make()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[3:].parameters(), lr=0.1)
    with warnings.catch_warnings(), gradwatch.watch(model, optimizer, schedule=EVERY) as monitor:
        warnings.simplefilter("error")
        for step, (x, y) in enumerate(batches()):
            if step == 3:
                model[0].requires_grad_(True)
                optimizer.add_param_group({"params": model[0].parameters()})
            loss = loss_of(model, x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss)

    assert np.isnan(monitor.history["grad.l2"][:3, 0]).all()
    assert np.isfinite(monitor.history["grad.l2"][3:, 0]).all()


class Mark:
    """Something that can be looked for."""


def test_neither_graph_nor_batch_is_kept():
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    alive = []
    with gradwatch.watch(model, optimizer, schedule=EVERY) as monitor:
        for x, y in batches():
            x = x.clone()
            loss = loss_of(model, x, y)
            loss.backward()
            optimizer.step()
            graph = loss.grad_fn.metadata["mark"] = Mark()  # lives as long as the graph
            alive += [weakref.ref(t) for t in (x, loss, graph, model[0].weight.grad)]
            monitor.step(loss, batch=[x], val_loss=loss, grad_norm=loss)
            optimizer.zero_grad()
            del x, loss, graph
        gc.disable()  # nothing may wait for the collector of cycles
        try:
            assert not [r() for r in alive if r() is not None]
        finally:
            gc.enable()


@pytest.mark.parametrize(
    ("make_model", "autocast", "expected"),
    [
        (make, None, "fp32"),
        (make, torch.bfloat16, "bf16"),
        (make, torch.float16, "fp16"),
        (lambda: make().bfloat16(), None, "bf16"),
    ],
)
@pytest.mark.parametrize("inside", [False, True])
def test_the_format_of_the_forward_pass_is_seen(make_model, autocast, expected, inside, tmp_path):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = make_model()

        def forward(self, x):
            with context() if inside else contextlib.nullcontext():
                return self.body(x.to(self.body[0].weight.dtype))

    def context():
        return torch.autocast("cpu", autocast) if autocast else contextlib.nullcontext()

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradwatch.watch(model, optimizer, run=tmp_path / "run") as monitor:
        model.eval()
        model(torch.ones(2, 6))  # a trial without autocast tells nothing
        model.train()
        with context():
            loss = model(torch.ones(2, 6)).float().sum()
        loss.backward()
        optimizer.step()
        monitor.step(loss)
        assert disk.read(tmp_path / "run").info.precision == expected, "also where the process dies before the end"

    assert monitor.history.info.precision == expected


def test_a_run_directory_holds_what_the_monitor_said(tmp_path):
    model = nn.Sequential(*[layer for _ in range(12) for layer in (nn.Linear(6, 6), nn.Sigmoid())], nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x, y = next(batches(samples=16))
    with gradwatch.watch(model, optimizer, run=tmp_path / "run") as monitor:
        for _ in range(40):
            loss = loss_of(model, x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss, batch=x)

    stored = gradwatch.load_run(tmp_path / "run")

    assert {"vanishing-gradient", "constant-batch"} <= {f.kind for f in monitor.findings()}
    assert tuple(stored.findings) == monitor.findings()
    np.testing.assert_array_equal(stored["grad.l2"], monitor.history["grad.l2"])
    assert disk.status(tmp_path / "run") == "finished"
    assert list((tmp_path / "run").rglob("events.out.tfevents*")), "for TensorBoard"


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt, "interrupted"), (ZeroDivisionError, "failed")])
def test_a_run_says_how_it_ended(error, status, tmp_path):
    model = make()
    with pytest.raises(error), gradwatch.watch(model, torch.optim.SGD(model.parameters()), run=tmp_path / "run"):
        raise error

    assert disk.status(tmp_path / "run") == status


def test_a_directory_with_a_run_is_refused_before_training(tmp_path):
    model = make()
    optimizer = torch.optim.SGD(model.parameters())
    gradwatch.watch(model, optimizer, run=tmp_path / "run").close()

    with pytest.raises(GradwatchError, match="already holds a run"):
        gradwatch.watch(model, optimizer, run=tmp_path / "run")

    assert not optimizer._optimizer_step_pre_hooks


NEVER_CLOSED = """
import torch, gradwatch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
monitor = gradwatch.watch(model, optimizer, run={run!r})
for _ in range(3):
    loss = model(torch.ones(4, 2)).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    monitor.step(loss)
"""


def test_a_monitor_that_is_never_closed_loses_nothing_and_does_no_harm(tmp_path):
    code = NEVER_CLOSED.format(run=str(tmp_path / "run"))

    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert (ended.returncode, ended.stderr) == (0, "")
    assert len(gradwatch.load_run(tmp_path / "run")["loss"]) == 3


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
    assert losses_of(*[1.0] * 5, math.nan, 1.0) == [(5, "the loss became nan")]
    assert losses_of(*[math.nan] * 3) == [(0, "the loss became nan")], "finite gradients do not make it missing"


@pytest.mark.parametrize(("value", "event"), [(math.nan, "batch-nonfinite"), (2.0, "batch-finite")])
def test_inputs_are_looked_at_once_when_the_loss_is_not_finite(value, event):
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = {"x": [torch.ones(4, 3), torch.tensor([1.0, value])]}
    with gradwatch.watch(model, optimizer) as monitor:
        for loss in (1.0, math.inf, math.inf):
            monitor.step(loss, batch=inputs)

    assert [(e.kind, e.step) for e in monitor.history.events if e.kind.startswith("batch-")] == [(event, 1)]
