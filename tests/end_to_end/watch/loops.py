"""Training loops as people write them, with a watch or with none, and what their history must hold."""

import contextlib

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradwatch
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


def observe_and_clip_in_a_closure(model, optimizer, monitor, loss):
    def closure():
        optimizer.zero_grad()
        loss.backward()
        monitor.observe()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        return loss

    optimizer.step(closure)
    monitor.step(loss)


def hand_over_norm(model, optimizer, monitor, loss):
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()
    monitor.step(loss, grad_norm=norm)
