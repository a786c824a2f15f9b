"""A copy that is written and never updated is reported; targets, averages, references and opponents are not."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import gradwatch
from gradwatch.events import COPY_STATISTICS, COPY_UNCHANGED
from gradwatch.probe.copies.pairs import find_pairs
from gradwatch.probe.copies.unheld import find_unheld, held_by

KINDS = (COPY_UNCHANGED.name, COPY_STATISTICS.name)


def network():
    return nn.Sequential(nn.Linear(6, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 3))


def batch():
    x = 5 * torch.randn(32, 6) + 3
    return x, x[:, :3].argmax(1)


def trained(follow, *, make_copy=copy.deepcopy, steps=150, mode=True, hold=lambda model, other: model):
    """Train with `follow(copy, model, step)` after each update, and return the monitor.

    The copy is called without gradients at each step, in training mode or not.
    """
    torch.manual_seed(0)
    model = network()
    other = make_copy(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with gradwatch.watch(hold(model, other), optimizer, on_finding=None) as monitor:
        for step in range(steps):
            x, y = batch()
            with torch.no_grad():
                other.train(mode)(x)
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            follow(other, model, step)
            monitor.step(loss)
    assert not any(part._load_state_dict_pre_hooks or part._forward_pre_hooks for part in other.modules())
    return monitor


def pairs_of(model):
    """Return the copies of a model that Adam moves."""
    held = held_by([torch.optim.Adam(model.parameters())])
    return [pair.copy for pair in find_pairs(model, held, find_unheld(model, held))]


def events(monitor):
    return {event.kind for event in monitor.history.events if event.kind in KINDS}


def averaged(decay, *, buffers=True):
    """Return a function that moves a copy towards the model, as most scripts write it."""

    def follow(other, model, step):
        with torch.no_grad():
            for kept, new in zip(other.parameters(), model.parameters(), strict=True):
                kept.mul_(decay).add_(new, alpha=1 - decay)
            if buffers:
                for kept, new in zip(other.buffers(), model.buffers(), strict=True):
                    kept.copy_(new)

    return follow


def copied(every, source):
    """Return a function that loads the state of `source(copy, model)` now and then."""

    def follow(other, model, step):
        if step % every == every - 1:
            other.load_state_dict(source(other, model).state_dict())

    return follow


@pytest.mark.parametrize(
    "follow",
    [
        pytest.param(copied(10, lambda other, model: other), id="copied from itself"),
        pytest.param(averaged(1.0), id="a decay of 1"),
    ],
)
def test_a_copy_that_is_written_and_keeps_its_values_is_reported(follow):
    monitor = trained(follow)

    assert COPY_UNCHANGED.name in events(monitor)
    assert [finding.kind for finding in monitor.findings()] == ["not-optimized"]


def test_a_copy_inside_the_model_is_named():
    def hold(model, other):
        return nn.ModuleDict({"online": model, "target": other.requires_grad_(False)})

    monitor = trained(copied(10, lambda other, model: other), hold=hold)

    assert [finding.layer for finding in monitor.findings()] == ["target"]


def pooled(other, model, step):
    """Load the only opponent of a pool for each game."""
    if step % 10 == 9:
        other.load_state_dict(pooled.first)


def of_first(model):
    pooled.first = copy.deepcopy(model.state_dict())
    return copy.deepcopy(model)


@pytest.mark.parametrize(
    ("follow", "make_copy"),
    [
        pytest.param(copied(50, lambda other, model: model), copy.deepcopy, id="hard copies"),
        pytest.param(copied(10**4, lambda other, model: model), copy.deepcopy, id="rare copies"),
        pytest.param(averaged(0.99), copy.deepcopy, id="average"),
        pytest.param(lambda other, model, step: None, copy.deepcopy, id="reference that is never written"),
        pytest.param(pooled, of_first, id="opponent that is loaded again and again"),
        pytest.param(
            lambda other, model, step: other.update_parameters(model),
            lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99), use_buffers=True),
            id="averaged by torch",
        ),
        pytest.param(copied(10, lambda other, model: other), lambda model: network(), id="other initial weights"),
    ],
)
@pytest.mark.parametrize("mode", [True, False], ids=["training", "evaluation"])
def test_other_copies_are_not(follow, make_copy, mode):
    assert events(trained(follow, make_copy=make_copy, mode=mode)) == set()


def test_an_average_with_a_late_start_is_not():
    def follow(other, model, step):
        averaged(1.0 if step < 40 else 0.99)(other, model, step)

    assert events(trained(follow)) == set()


def test_a_copy_with_an_optimizer_is_not():
    def make_copy(model):
        other = copy.deepcopy(model)
        other.optimizer = torch.optim.SGD(other.parameters(), lr=0.0)
        return other

    assert events(trained(lambda other, model, step: other.optimizer.step(), make_copy=make_copy)) == set()


def test_an_average_that_evaluates_with_its_first_statistics_is_reported():
    monitor = trained(averaged(0.95, buffers=False), mode=False)

    assert events(monitor) == {COPY_STATISTICS.name}
    assert [finding.kind for finding in monitor.findings()] == ["train-eval-mismatch"]


def refreshed(other, model, step):
    averaged(0.95, buffers=False)(other, model, step)
    if step % 10 == 9:
        update_bn([batch()[0] for _ in range(8)], other)


@pytest.mark.parametrize(
    ("follow", "mode"),
    [
        pytest.param(averaged(0.95), False, id="buffers that are copied"),
        pytest.param(averaged(0.95, buffers=False), True, id="a target that normalizes by its batches"),
        pytest.param(refreshed, False, id="statistics that are measured for the evaluation"),
    ],
)
def test_an_average_with_other_statistics_is_not(follow, mode):
    assert events(trained(follow, mode=mode)) == set()


def test_frozen_statistics_of_both_are_not():
    def follow(other, model, step):
        model.eval()
        averaged(0.95, buffers=False)(other, model, step)

    def make_copy(model):
        model(batch()[0])
        model.eval()
        return copy.deepcopy(model)

    assert events(trained(follow, make_copy=make_copy, mode=False)) == set()


def test_wrappers_and_parts_that_share_parameters_are_no_copies():
    model = network()
    shared = nn.Sequential(*list(model.children())[:2]), AveragedModel(network()), copy.copy(model)

    assert pairs_of(model) == []
    assert len(shared) == 3


def test_the_largest_copy_stands_for_its_parts():
    model = nn.ModuleDict({"actor": network(), "critic": network()})
    other = copy.deepcopy(model)

    assert pairs_of(model) == [other]


def test_copies_do_not_change_the_training_and_are_not_kept_alive():
    def weights(watch):
        torch.manual_seed(0)
        model = network()
        other = copy.deepcopy(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        monitor = gradwatch.watch(model, optimizer, on_finding=None) if watch else None
        for step in range(40):
            x, y = batch()
            loss = F.cross_entropy(model(x), y) + F.mse_loss(model(x), other(x).detach())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            averaged(0.9)(other, model, step)
            if monitor:
                monitor.step(loss)
        if monitor:
            monitor.close()
        return [*model.parameters(), *other.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(weights(True), weights(False), strict=True))
