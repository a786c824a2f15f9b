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


def _grads(loss, module):
    return torch.autograd.grad(loss, list(module.parameters()))
