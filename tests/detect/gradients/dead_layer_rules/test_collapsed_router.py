"""A collapsed router is one finding, with its experts, which ends when other experts get tokens."""

import torch
from torch import nn
from torch.nn import functional as F

import gradwatch
from gradwatch.detect.gradients.dead_layer import DeadLayer
from gradwatch.diagnose.rank import diagnose
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Severity

EXPERTS = 6


class Switch(nn.Module):
    """A router that takes the best of six experts, and prefers the first ones by a bias."""

    def __init__(self, bias):
        super().__init__()
        self.router = nn.Linear(8, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(EXPERTS))
        with torch.no_grad():
            self.router.bias[:2] += bias

    def forward(self, x):
        weight, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mine = (chosen == i).nonzero()[:, 0]
            out = out.index_put((mine,), weight[mine, None] * expert(x[mine]))
        return x + out


def findings(bias):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Switch(bias), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with gradwatch.watch(model, optimizer, on_finding=None) as monitor:
        for _ in range(61):
            x = torch.randn(128, 8)
            loss = F.cross_entropy(model(x), (x[:, 0] > 0).long())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(loss, batch=x)
    return monitor.history


def test_unused_experts_are_one_finding_of_their_router_with_a_remedy():
    history = findings(bias=20.0)

    (found,) = [f for f in history.findings if f.severity > Severity.INFO]
    (diagnosis,) = [d for d in diagnose(history) if d.severity > Severity.INFO]
    assert (found.kind, found.onset) == ("dead-layer", 0)
    assert found.names == ("1.router", *(f"1.experts.{i}" for i in range(2, 6)))
    assert "4 of 6 experts" in found.message
    assert "load-balancing loss" in diagnosis.remedies[0].text


def test_a_router_that_uses_its_experts_raises_nothing():
    assert [f for f in findings(bias=0.0).findings if f.severity > Severity.INFO] == []


def test_a_finding_ends_where_five_samples_use_more_experts():
    made = Synthetic(steps=260, activations=2).routed(1, unused=40, tokens=32, onset=60, end=150)
    (finding,) = DeadLayer().detect(made.history(until=121))

    still = DeadLayer().recovery(made.history(until=181), finding)
    over = DeadLayer().recovery(made.history(until=191), finding)

    assert still is None, "samples at steps 150 to 180 are four"
    assert over.step == 150
