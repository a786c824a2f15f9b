"""Steps without an update say nothing about which parameters the loss reaches."""

import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

import gradwatch
from gradwatch.detect.gradients.no_gradient import NoGradient
from gradwatch.detect.updates.not_optimized import NotOptimized
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Severity


def test_skipped_steps_alone_are_no_evidence_and_no_trouble(replay):
    made = Synthetic(steps=40).no_gradient(None)
    made.skipped_T[:] = 1

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert replay(made.history(), [NoGradient()]) == (), "nothing was looked at"


def test_a_factor_whose_other_one_nothing_moves_is_for_information(replay):
    made = Synthetic(steps=40).no_gradient(4, zero=True)
    left = tuple(replace(layer, group=None) if i == 5 else layer for i, layer in enumerate(made.info.layers))
    made.info = replace(made.info, layers=left)
    made.update_factor_TL[:, 5] = 0

    found = {f.kind: f.severity for f in replay(made.history(), [NoGradient(), NotOptimized()])}

    assert found == {"not-optimized": Severity.WARNING, "no-gradient": Severity.INFO}


@pytest.mark.parametrize("critic_steps", [10, 20])
def test_a_policy_moved_by_hand_in_the_loop_of_its_critic_is_no_alarm(tmp_path, critic_steps):
    torch.manual_seed(0)
    model = nn.ModuleDict({"actor": nn.Linear(4, 2), "critic": nn.Linear(4, 1)})
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with gradwatch.watch(model, optimizer, run=tmp_path / "run") as watched:
        for _ in range(3):
            states = torch.randn(64, 4)
            surrogate = model["actor"](states).log_softmax(1)[:, 0].mean()
            with torch.no_grad():
                for param, grad in zip(model["actor"].parameters(), _grads(surrogate, model["actor"]), strict=True):
                    param.add_(grad, alpha=0.05)
            for _ in range(critic_steps):
                loss = (model["critic"](states).squeeze(1) - states.sum(1)).pow(2).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                watched.step(loss)
        found = {f.kind for f in watched.findings() if f.severity > Severity.INFO and f.withdrawn is None}

    assert "no-gradient" not in found


class _Generated(nn.Module):
    """A layer whose weights another layer generates, as a hypernetwork does."""

    def __init__(self):
        super().__init__()
        self.generator, self.layer = nn.Linear(3, 10), nn.Linear(4, 2)

    def forward(self, x):
        made = self.generator(torch.ones(3))
        return torch.func.functional_call(self.layer, {"weight": made[:8].view(2, 4), "bias": made[8:]}, (x,))


@pytest.mark.parametrize(("held", "severity"), [("generator", Severity.INFO), ("all", Severity.WARNING)])
def test_weights_that_are_generated_are_a_warning_only_if_they_are_to_be_trained(tmp_path, held, severity):
    torch.manual_seed(0)
    model = _Generated()
    params = model.parameters() if held == "all" else model.generator.parameters()
    optimizer = torch.optim.Adam(params, lr=1e-2)
    with gradwatch.watch(model, optimizer, run=tmp_path / "run") as watched:
        for _ in range(30):
            x = torch.randn(16, 4)
            loss = (model(x) - x[:, :2]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            watched.step(loss)
        found = {f.layer: f.severity for f in watched.findings() if f.kind == "no-gradient"}

    assert found == {"layer": severity}


def _grads(loss, module):
    return torch.autograd.grad(loss, list(module.parameters()))
