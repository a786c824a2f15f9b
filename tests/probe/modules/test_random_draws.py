"""Modules whose draws an evaluation ends for good are found; the search changes no draw and leaves no hook."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradwatch
from gradwatch.events import DRAWS_ENDED


class Block(nn.Module):
    def __init__(self, act, config=None):
        super().__init__()
        self.linear, self.act, self.rate, self.scale = nn.Linear(8, 8), act, 0.3, 1.0
        self.config, self.calls = config, 0
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        self.calls += self.training
        return x + self.act(self, self.linear(x))


class Net(nn.Module):
    def __init__(self, act, depth=2):
        super().__init__()
        config = SimpleNamespace(noise=0.1)
        self.blocks = nn.ModuleList(Block(act, config) for _ in range(depth))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def lost_rate(module, x):
    if not module.training:
        module.rate = 0.0
    return F.dropout(x, module.rate, module.training and module.rate > 0)


def lost_noise(module, x):
    """Noise of a strength that all blocks share."""
    if not module.training:
        module.config.noise = 0.0
    return x + module.config.noise * torch.randn_like(x) if module.config.noise else x


def lost_paths(module, x):
    """Stochastic depth that an evaluation switches off."""
    if not module.training:
        module.scale = 0.0
    return x * (torch.rand(len(x), 1) > 0.1) if module.scale else x


def local_rate(module, x):
    return F.dropout(x, module.rate if module.training else 0.0)


def annealed(module, x):
    """Dropout until the third validation."""
    return F.dropout(x, 0.3, module.training and module.calls < 70)


def decayed(module, x):
    """Dropout that a schedule ends long before the first validation."""
    return F.dropout(x, 0.3, module.training and module.calls < 8)


def rare_paths(module, x):
    return x * (torch.rand(len(x), 1) > 0.02) if module.training else x


def sampler(module, x):
    return x[torch.randperm(len(x))] * 0.1


def nothing(_, x):
    return torch.relu(x)


def own_dropout(module, x):
    """A dropout module whose rate the loop sets to 0, as it may."""
    if not module.training:
        module.drop.p = 0.0
    return module.drop(x)


def skipped(module, x):
    """A part of the model that is no longer called."""
    return module.drop(x) if module.calls < 20 else x


def trained(model, *, is_watched=True, leaves_eval=True):
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = gradwatch.watch(model, optimizer, on_finding=None) if is_watched else None
    held_out, losses, hooks = torch.randn(16, 8), [], []
    for step in range(90):
        if leaves_eval or step < 20:
            model.train()
        loss = F.cross_entropy(model(torch.randn(16, 8)), torch.arange(16) % 3)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        value = None
        if step % 20 == 19:
            model.eval()
            with torch.no_grad():
                value = F.cross_entropy(model(held_out), torch.arange(16) % 3)
        losses.append(loss.item())
        hooks.append(sum(len(m._forward_pre_hooks) for m in model.blocks))
        if monitor:
            monitor.step(loss, val_loss=value)
    if monitor is None:
        return losses
    ended = [f for f in monitor.findings() if any(q.key == "drawing modules" for q in f.evidence)]
    named = {(f.layer, str(f.severity)) for f in ended}
    found = [(e.layer, e.step) for e in monitor.history.events if e.kind == DRAWS_ENDED.name]
    monitor.close()
    return losses, found, named, hooks


def made(act):
    torch.manual_seed(0)
    return Net(act)


@pytest.mark.parametrize("act", [lost_rate, lost_noise, lost_paths])
def test_draws_that_an_evaluation_ends_are_found(act):
    _, found, named, _ = trained(made(act))

    assert found == [("blocks", 22)]
    assert named == {("blocks", "warning")}


QUIET = [local_rate, annealed, decayed, rare_paths, sampler, nothing, own_dropout, skipped]


@pytest.mark.parametrize("act", QUIET)
def test_other_draws_are_quiet(act):
    assert trained(made(act))[1] == []


def test_a_model_left_in_evaluation_mode_is_another_finding():
    assert trained(made(lost_rate), leaves_eval=False)[1] == []


@pytest.mark.parametrize("act", [lost_rate, lost_paths, rare_paths, sampler])
def test_losses_are_the_same_to_the_last_bit(act):
    assert trained(made(act))[0] == trained(made(act), is_watched=False)


def test_hooks_are_there_at_sampled_steps_only():
    model = made(rare_paths)
    hooks = trained(model)[3]

    usual = min(hooks)  # other inspections have hooks as well
    assert hooks[1] > usual
    assert 2 * hooks.count(usual) > len(hooks)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
