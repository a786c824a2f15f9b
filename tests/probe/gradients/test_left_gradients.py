"""Gradients that another optimizer's loss leaves in the watched model are found; loops that clear them are no news."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.optimizer import _global_optimizer_pre_hooks

import gradwatch


def net(*sizes):
    pairs = itertools.pairwise(sizes)
    return nn.Sequential(*[part for a, b in pairs for part in (nn.Linear(a, b), nn.Tanh())][:-1])


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1e-2)


def kinds(monitor):
    return {f.kind for f in monitor.findings() if f.kind == "missing-zero-grad"}


def train_gan(*, clears_before, critic_steps=1, watches_both=False, generator_first=False, steps=40):
    """Train a GAN whose discriminator is cleared before its own backward pass, or only after its update."""
    torch.manual_seed(0)
    generator, critic = net(4, 8, 6), net(6, 8, 1)
    g, d = sgd(generator), sgd(critic)
    models, optimizers = ({"g": generator, "d": critic}, [g, d]) if watches_both else (critic, d)

    def step_generator():
        critic(generator(torch.randn(8, 4))).mean().backward()
        g.step()
        g.zero_grad()

    with gradwatch.watch(models, optimizers) as monitor:
        for step in range(steps):
            is_turn = step % critic_steps == 0
            if generator_first and is_turn:
                step_generator()
            if clears_before:
                d.zero_grad()
            loss = F.softplus(critic(torch.randn(8, 6))).mean() - critic(generator(torch.randn(8, 4)).detach()).mean()
            loss.backward()
            d.step()
            if not clears_before:
                d.zero_grad()
            if not generator_first and is_turn:
                step_generator()
            monitor.step(loss)
    return monitor


@pytest.mark.parametrize("generator_first", [False, True])
@pytest.mark.parametrize("watches_both", [False, True])
def test_a_generator_that_leaves_gradients_in_its_critic_is_found(generator_first, watches_both):
    monitor = train_gan(clears_before=False, generator_first=generator_first, watches_both=watches_both)

    assert kinds(monitor) == {"missing-zero-grad"}


def test_it_is_found_where_the_critic_makes_several_updates_for_each_of_the_generator():
    assert kinds(train_gan(clears_before=False, critic_steps=5)) == {"missing-zero-grad"}


@pytest.mark.parametrize("critic_steps", [1, 5])
def test_a_critic_that_is_cleared_before_its_own_pass_is_no_news(critic_steps):
    assert kinds(train_gan(clears_before=True, critic_steps=critic_steps, watches_both=True)) == set()


@pytest.mark.parametrize("clears_before", [True, False])
def test_an_actor_that_leaves_gradients_in_its_value_network_is_found(clears_before):
    torch.manual_seed(0)
    actor, value = net(4, 8, 2), net(6, 8, 1)
    of_actor, of_value = (torch.optim.Adam(m.parameters(), lr=1e-3) for m in (actor, value))
    with gradwatch.watch({"actor": actor, "value": value}, [of_actor, of_value]) as monitor:
        for _ in range(20):
            state = torch.randn(16, 4)
            if clears_before:
                of_value.zero_grad()
            loss = (value(torch.cat([state, torch.randn(16, 2)], 1)) - state.sum(1, keepdim=True)).square().mean()
            loss.backward()
            of_value.step()
            of_value.zero_grad(set_to_none=False)
            of_actor.zero_grad()
            (-value(torch.cat([state, actor(state)], 1)).mean()).backward()
            of_actor.step()
            monitor.step(loss)

    assert kinds(monitor) == (set() if clears_before else {"missing-zero-grad"})


@pytest.mark.parametrize("clears_before", [True, False])
def test_an_attack_that_leaves_gradients_in_the_attacked_model_is_found(clears_before):
    torch.manual_seed(0)
    model, shift = net(4, 8, 3), nn.Parameter(torch.zeros(4))
    optimizer, attack = sgd(model), torch.optim.SGD([shift], lr=0.1, maximize=True)
    with gradwatch.watch(model, optimizer) as monitor:
        for _ in range(20):
            x, y = torch.randn(16, 4), torch.randint(0, 3, (16,))
            F.cross_entropy(model(x + shift), y).backward()
            attack.step()
            attack.zero_grad()
            if clears_before:
                optimizer.zero_grad()
            loss = F.cross_entropy(model(x + shift.detach()), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss)

    assert kinds(monitor) == (set() if clears_before else {"missing-zero-grad"})


def heads_in_turn(trunk, heads, optimizers):
    """Two heads with optimizers of their own send gradients back into one trunk, which sums them on purpose."""
    for head, optimizer in zip(heads, optimizers[1:], strict=True):
        head(trunk(torch.randn(8, 4))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizers[0].step()
    optimizers[0].zero_grad()


def encoders_in_turn(head, encoders, optimizers):
    """Two encoders with optimizers of their own lie behind one head, which sums their gradients on purpose."""
    for encoder, optimizer in zip(encoders, optimizers[1:], strict=True):
        head(encoder(torch.randn(8, 6))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizers[0].step()
    optimizers[0].zero_grad()


def more_often(head, encoders, optimizers):
    """An encoder is updated after each of two micro-batches, and its head after both."""
    for _ in range(2):
        head(encoders[0](torch.randn(8, 6))).square().mean().backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    optimizers[0].step()
    optimizers[0].zero_grad()


@pytest.mark.parametrize("loop", [heads_in_turn, encoders_in_turn, more_often])
def test_gradients_that_are_summed_on_purpose_are_no_news(loop):
    torch.manual_seed(0)
    shared, others = net(4, 8, 6), [net(6, 8, 4), net(6, 8, 4)]
    optimizers = [sgd(shared), *map(sgd, others)]
    with gradwatch.watch({"shared": shared, "a": others[0], "b": others[1]}, optimizers) as monitor:
        for _ in range(20):
            loop(shared, others, optimizers)
            monitor.step(1.0)

    assert kinds(monitor) == set()


def test_the_hooks_are_removed_once_the_check_is_over():
    torch.manual_seed(0)
    model = net(4, 8, 1)
    optimizer, before = sgd(model), len(_global_optimizer_pre_hooks)
    with gradwatch.watch(model, optimizer) as monitor:
        during = len(_global_optimizer_pre_hooks)
        for _ in range(12):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).mean().backward()
            optimizer.step()
            monitor.step(1.0)
        after = len(_global_optimizer_pre_hooks)

    assert during > before
    assert after == before
