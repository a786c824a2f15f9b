"""Parameters that no optimizer holds, and optimizers that update nothing, are found in whole loops."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradwatch
from gradwatch.detect.updates.not_optimized import NotOptimized
from gradwatch.events import UNHELD
from gradwatch.records import Severity

STEPS = 40


def network(*widths):
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))[:-1]


def adam(*models):
    return torch.optim.Adam([p for model in models for p in model.parameters()], lr=1e-3)


def watched(update, models, optimizers, steps=STEPS):
    """Return the history and the findings `not-optimized` of a loop that calls `update` per step."""
    with gradwatch.watch(models, optimizers, on_finding=None) as monitor:
        for _ in range(steps):
            monitor.step(update())
    return monitor.history, [f for f in monitor.findings() if f.kind == NotOptimized.kind]


def trained(loss_of, optimizer):
    def update():
        optimizer.zero_grad()
        loss = loss_of(torch.randn(32, 8))
        loss.backward()
        optimizer.step()
        return loss

    return update


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def class_centers(model):
    centers = nn.Parameter(torch.randn(5, 8))
    return lambda x: F.cross_entropy(10 * F.linear(F.normalize(model(x)), F.normalize(centers)), x[:, :5].argmax(1))


def loss_weights(model):
    logs = torch.zeros(8, requires_grad=True)
    return lambda x: ((model(x) - x).square().mean(0) * torch.exp(-logs) + logs).sum()


def temperature(model):
    scale = nn.Parameter(torch.tensor(3.0))
    return lambda x: F.cross_entropy(scale.exp() * F.normalize(model(x)) @ F.normalize(x).T, torch.arange(len(x)))


def judge(model):
    critic = network(8, 16, 1)
    return lambda x: -critic(model(x)).mean()


@pytest.mark.parametrize("made", [class_centers, loss_weights, temperature, judge])
def test_tensors_of_the_loss_that_no_optimizer_holds_are_reported(made):
    model = network(8, 16, 8)
    optimizer = adam(model)

    history, (finding,) = watched(trained(made(model), optimizer), model, optimizer)

    assert finding.severity is Severity.INFO
    assert [e.kind for e in history.events if e.kind == UNHELD.name] == [UNHELD.name]


@pytest.mark.parametrize("cleared", ["before its own loss", "before each loss"])
def test_a_critic_of_another_optimizer_is_not_reported(cleared):
    model, critic = network(8, 16, 8), network(8, 16, 1)
    optimizer, own = adam(model), adam(critic)
    update = trained(lambda x: -critic(model(x)).mean(), optimizer)

    def both():
        own.zero_grad()
        (critic(model(torch.randn(32, 8)).detach()) - critic(torch.randn(32, 8))).mean().backward()
        own.step()
        if cleared == "before each loss":
            own.zero_grad()
        return update()

    history, found = watched(both, model, optimizer)

    assert found == []
    assert UNHELD.name not in {e.kind for e in history.events}


def test_a_frozen_network_in_the_loss_is_not_reported():
    model, features = network(8, 16, 8), network(8, 16, 4).requires_grad_(False)
    optimizer = adam(model)
    loss_of = lambda x: (features(model(x)) - features(x)).square().mean()  # noqa: E731

    assert watched(trained(loss_of, optimizer), model, optimizer)[1] == []


@pytest.mark.parametrize("clears_all", [True, False])
def test_a_backbone_that_is_left_out_is_a_warning_where_its_gradient_adds_up(clears_all):
    model = network(8, 16, 16, 8)
    optimizer, norms = adam(model[-1]), []

    def update():
        (model if clears_all else optimizer).zero_grad()
        x = torch.randn(32, 8)
        loss = (model(x) - x).square().mean()
        loss.backward()
        norms.append(np.sqrt(sum(p.grad.double().square().sum().item() for p in model[-1].parameters())))
        optimizer.step()
        return loss

    history, found = watched(update, model, optimizer)

    assert {f.severity for f in found} == {Severity.INFO if clears_all else Severity.WARNING}
    np.testing.assert_allclose(history["grad_norm.before_clip"], norms, rtol=1e-6)


def test_a_second_critic_that_is_left_out_is_a_warning():
    actor, first, second = network(8, 2), network(10, 16, 1), network(10, 16, 1)
    of_actor, of_critics = adam(actor), adam(first)

    def update():
        states, targets = torch.randn(32, 8), torch.randn(32, 1)
        pairs = torch.cat([states, torch.randn(32, 2)], 1)
        of_critics.zero_grad()
        ((first(pairs) - targets).square().mean() + (second(pairs) - targets).square().mean()).backward()
        of_critics.step()
        chosen = torch.cat([states, actor(states)], 1)
        loss = -torch.min(first(chosen), second(chosen)).mean()
        of_actor.zero_grad()
        loss.backward()
        of_actor.step()
        return loss

    models = {"actor": actor, "first": first, "second": second}
    _, (finding,) = watched(update, models, [of_actor, of_critics])

    assert (finding.layer, finding.severity) == ("second", Severity.WARNING)


def test_a_generator_that_no_optimizer_holds_is_a_warning():
    generator, critic = network(8, 16, 8), network(8, 16, 1)
    of_generator, of_critic = adam(critic), adam(critic)

    def update():
        of_critic.zero_grad()
        (critic(generator(torch.randn(32, 8)).detach()) - critic(torch.randn(32, 8))).mean().backward()
        of_critic.step()
        of_generator.zero_grad()
        loss = -critic(generator(torch.randn(32, 8))).mean()
        loss.backward()
        of_generator.step()
        return loss

    _, (finding,) = watched(update, {"generator": generator, "critic": critic}, [of_generator, of_critic])

    assert (finding.layer, finding.severity) == ("generator", Severity.WARNING)


def test_nothing_to_train_is_critical_at_the_first_step():
    model, head = network(8, 16, 8).requires_grad_(False), network(8, 1)
    optimizer = adam(model)

    _, found = watched(trained(lambda x: head(model(x)).mean(), optimizer), model, optimizer)

    assert (found[0].step, found[0].severity) == (0, Severity.CRITICAL)


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.filterwarnings("ignore:gradwatch. optimizer. SGD holds none:RuntimeWarning")
def test_an_optimizer_without_parameters_is_critical_at_the_first_step_and_stops_no_loop(several):
    model = network(8, 16, 8)
    empty = torch.optim.SGD([{"params": []}], lr=0.1)
    full = adam(model)

    _, found = watched(trained(lambda x: model(x).mean(), full), model, [empty, full] if several else empty)

    assert (found[0].kind, found[0].step) == ("not-optimized", 0)
    assert found[0].severity == (Severity.WARNING if several else Severity.CRITICAL)
    assert found[0].message == "the optimizer SGD holds no parameter, so it updates nothing"


class Idle(torch.optim.Optimizer):
    """Returns before its update, as one does that asks the first parameter for a gradient, or a flag that is unset."""

    def __init__(self, params, works_at=()):
        super().__init__(params, {"lr": 1e-2})
        self.works_at, self.calls = works_at, 0

    @torch.no_grad()
    def step(self, closure=None):
        self.calls += 1
        for param in self.param_groups[0]["params"]:
            if self.calls in self.works_at and param.grad is not None:
                param.sub_(1e-3 * param.grad.sign())


class OnCopies(torch.optim.Adam):
    """Updates a copy of the parameters, which nothing copies back."""

    def step(self, closure=None):
        groups, copies = self.param_groups, []
        for param in groups[0]["params"]:
            copies.append(param.detach().clone())
            copies[-1].grad = param.grad
        self.param_groups = [{**groups[0], "params": copies}]
        super().step()
        self.param_groups = groups


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("make", [Idle, OnCopies])
def test_an_optimizer_that_makes_no_update_is_critical(make, frozen):
    model = network(8, 16, 16, 8)
    model[0].requires_grad_(not frozen)
    optimizer = make(model.parameters())

    _, found = watched(trained(lambda x: (model(x) - x).square().mean(), optimizer), model, optimizer)

    assert [f.severity for f in found] == [Severity.CRITICAL]
    assert "no update is made" in found[0].message


def test_one_that_updates_between_the_measured_steps_is_not():
    model = network(8, 16, 8)
    optimizer = Idle(model.parameters(), works_at=range(0, 100, 7))

    assert watched(trained(lambda x: (model(x) - x).square().mean(), optimizer), model, optimizer)[1] == []


@pytest.mark.parametrize("rate", [0.0, 1e-12])
def test_a_rate_of_nothing_is_no_missing_update(rate):
    model = network(8, 16, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)

    _, found = watched(trained(lambda x: (model(x) - x).square().mean(), optimizer), model, optimizer)

    assert not [f for f in found if "no update" in f.message]
