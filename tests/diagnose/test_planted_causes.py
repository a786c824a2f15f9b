"""Faults that look alike are told apart by what the gradients, the rate and the loss show."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradwatch
from gradwatch.diagnose.rank import diagnose
from gradwatch.records import Severity


def causes(model, loss_of, *, optimizer, growth=1.0, steps=100, inputs=lambda: torch.randn(32, 8)):
    """Train a loop of one's own, and return the diagnoses of its warnings."""
    with gradwatch.watch(model, optimizer, on_finding=None) as monitor:
        for _ in range(steps):
            x = inputs()
            loss = loss_of(model, x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(loss, batch=x)
            for group in optimizer.param_groups:
                group["lr"] *= growth
    return [d for d in diagnose(monitor.history) if d.severity > Severity.INFO]


class ActorCritic(nn.Module):
    """A policy and a value; the value has no path to the loss, for one of several reasons."""

    def __init__(self, cut):
        super().__init__()
        self.body, self.policy, self.value, self.cut = nn.Linear(8, 32), nn.Linear(32, 4), nn.Linear(32, 1), cut

    def forward(self, x):
        hidden = self.body(x).relu()
        return self.policy(hidden), self.cut(self.value, hidden)


def without_graph(value, hidden):
    with torch.no_grad():
        return value(hidden)


@pytest.mark.parametrize(
    "cut",
    [lambda value, hidden: value(hidden).detach(), without_graph, lambda value, hidden: hidden[:, :1]],
    ids=["detached", "no_grad", "unused"],
)
def test_a_gradient_of_none_is_no_branch_that_is_multiplied_by_zero(cut):
    torch.manual_seed(0)
    model = ActorCritic(cut)

    def loss_of(model, x):
        logits, value = model(x)
        return F.cross_entropy(logits, x[:, :4].argmax(1)) + (value - x.sum(1, keepdim=True)).square().mean()

    (diagnosis,) = causes(model, loss_of, optimizer=torch.optim.Adam(model.parameters(), lr=1e-3), steps=30)

    assert diagnosis.cause_id == "detached-layer"
    assert diagnosis.sureness == "almost certain"
    assert "multiplied by zero" not in diagnosis.confirm
    assert "model.value" in diagnosis.remedies[0].text


def classifier(act, width=32):
    return nn.Sequential(nn.Linear(8, width), act(), nn.Linear(width, width), act(), nn.Linear(width, 4))


def classify(model, x):
    return F.cross_entropy(model(x), x[:, :4].argmax(1))


@pytest.mark.parametrize(
    ("act", "make"),
    [
        (nn.Tanh, lambda params: torch.optim.SGD(params, lr=1e-2)),
        (nn.Sigmoid, lambda params: torch.optim.Adam(params, lr=1e-3)),
        (nn.ReLU, lambda params: torch.optim.RMSprop(params, lr=1e-4)),
        (nn.Tanh, lambda params: torch.optim.AdamW(params, lr=1e-4)),
    ],
    ids=["tanh-sgd", "sigmoid-adam", "relu-rmsprop", "tanh-adamw"],
)
def test_a_rate_that_grows_without_end_is_laid_to_the_rate(act, make):
    torch.manual_seed(0)
    model = classifier(act)

    made = causes(model, classify, optimizer=make(model.parameters()), growth=1.08, steps=140)

    assert made
    assert {d.cause_id for d in made} == {"learning-rate-too-high"}, [(d.cause_id, d.findings[0]) for d in made]
    assert made[0].remedies[0].text.endswith("limit the rise")


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (lambda: nn.Sequential(*classifier(nn.Tanh), nn.Softmax(1)), lambda: 1e4 * torch.rand(32, 8)),
        (lambda: nn.Sequential(*classifier(nn.Tanh), nn.Softmax(1)), lambda: 1e4 * torch.randn(32, 8)),
        (lambda: classifier(nn.Sigmoid), lambda: torch.randint(0, 256, (32, 8)).float()),
        (lambda: classifier(nn.Tanh), lambda: 1990 + 30 * torch.rand(32, 8)),
    ],
    ids=["policy", "centered-policy", "pixels", "years"],
)
def test_large_inputs_are_told_from_scores_that_are_not_divided(model, inputs):
    torch.manual_seed(0)
    net = model()

    def policy_gradient(model, x):
        chances = model(x) if isinstance(model[-1], nn.Softmax) else model(x).softmax(1)
        return -(chances.clamp_min(1e-6).log().gather(1, x[:, :4].argmax(1, keepdim=True))).mean()

    made = causes(net, policy_gradient, optimizer=torch.optim.Adam(net.parameters(), lr=1e-3), inputs=inputs, steps=40)

    first = next(d for d in made if d.findings[0].kind in ("saturated-activation", "layer-imbalance"))
    assert first.cause_id == "unscaled-inputs", [(d.cause_id, d.certainty) for d in made]
    assert "attention" not in first.confirm


def test_a_gradient_of_nan_behind_a_finite_loss_is_not_laid_to_the_data():
    torch.manual_seed(0)
    model = classifier(nn.ReLU)

    def loss_of(model, x):
        hidden = model[0](x)
        return classify(model, x) + 1e-3 * (hidden - hidden).abs().sqrt().mean()

    made = causes(model, loss_of, optimizer=torch.optim.Adam(model.parameters(), lr=1e-3), steps=10)

    assert made[0].cause_id == "singular-formula"
    assert made[0].remedies[0].code == "(x.abs() + eps).sqrt()"
