"""Two weights that are drawn too large multiply, whether they belong to two modules or to one."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import gradwatch
from gradwatch.detect.activations.poor_initialization import PoorInitialization
from gradwatch.events import MATRIX
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.history.synthetic.edit import with_statistic
from gradwatch.records import Severity


@pytest.mark.parametrize(
    ("large", "severity"), [((3, 4), Severity.WARNING), ((3,), Severity.INFO)], ids=["both", "one of them"]
)
def test_weights_of_one_module_count_each(large, severity, replay):
    made = Synthetic(steps=20)
    infos = [replace(info, module="mixer", module_type="Mixer") for info in made.info.layers]
    made.info = replace(made.info, layers=tuple(infos))
    for i in range(12):
        made.add_event(MATRIX, layer=infos[i].name, values={"weight": i, "inputs": 64})
    history = with_statistic(made.history(), "weight.l2", 8.0 * 8, layers=large)
    history = with_statistic(history, "weight.l2", 8.0, layers=tuple(i for i in range(12) if i not in large))

    found = replay(history, [PoorInitialization()])

    assert {finding.severity for finding in found} == {severity}
    assert len(found) == len(large)


class Agent(nn.Module):
    """A policy and its critic, each behind a recurrent layer with more units than inputs."""

    def __init__(self, *, shrink=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.actor, self.critic = nn.LSTM(3, 128), nn.LSTM(3, 128)
        self.action, self.value = nn.Linear(128, 1), nn.Linear(128, 1)
        nn.init.orthogonal_(self.action.weight, 0.01)
        nn.init.zeros_(self.value.bias)
        with torch.no_grad():
            for layer in (self.actor, self.critic):
                for weight in layer.parameters():
                    weight *= shrink

    def forward(self, x):
        return self.action(self.actor(x)[0]), self.value(self.critic(x)[0])


@pytest.mark.parametrize(("shrink", "kinds"), [(1.0, set()), (0.02, {"poor-initialization"})])
def test_weights_of_few_inputs_beside_a_large_state_are_as_small_as_torch_makes_them(shrink, kinds):
    agent = Agent(shrink=shrink)
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-4)
    with gradwatch.watch(agent, optimizer, on_finding=None) as monitor:
        for _ in range(12):
            action, value = agent(torch.randn(16, 8, 3))
            loss = action.square().mean() + 0.5 * (value + 500.0).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(loss)

    assert {finding.kind for finding in monitor.findings()} & {"poor-initialization"} == kinds
