"""Small training loops with a fault in the code of a loss, a module, an optimizer or a batch, each with its remedy."""

from __future__ import annotations

import copy
from functools import cache

import torch
from replay.remedy_cases import Loop, adam, batch_of, mlp, outlier, sgd
from torch import nn
from torch.distributions import Categorical
from torch.nn import functional as F

IGNORED = -100
"""Label that a cross entropy leaves out."""

FAULTY_STEP = 20
"""Step of the only batch in which no label counts."""


def assigned(code, name, **scope):
    """Run the lines of a remedy with the names that they use, and return the value that they assign."""
    exec(code, scope)
    return scope[name]


def empty_batch(step, fixed):
    x, y = batch_of(step, fixed)
    return x, torch.full_like(y, IGNORED) if step == FAULTY_STEP else y


def over_labels(model, x, y, fixed):
    logits = model(x)
    return assigned(fixed, "loss", F=F, logits=logits, labels=y) if fixed else F.cross_entropy(logits, y)


def cut_off(step, fixed):
    """Return prompts and answers, and labels for the answers, all cut off at 8 positions or not at all."""
    prompt, end = 12 if step == FAULTY_STEP else 4, 24 if fixed else 8
    x = torch.randn(4, 24, 8)
    y = x[..., :4].argmax(-1)
    y[:, :prompt] = IGNORED
    return x[:, :end], y[:, :end]


def triplets(model, x, y, fixed):
    near, far = model(x + 1e-3 * torch.randn_like(x)), model(x.roll(1, 0))
    return F.triplet_margin_loss(model(x), near, far, margin=1.0 if fixed else 1e-3)


class Returning(torch.optim.SGD):
    """An optimizer with a step that returns early."""

    is_ready = False

    def step(self, closure=None):
        return super().step(closure) if self.is_ready else None


def returning(model, fixed):
    optimizer = Returning(model.parameters(), lr=0.05)
    optimizer.is_ready = bool(fixed)
    return optimizer


def sensors(step, fixed):
    """Return the past and the future of 4 sensors; the first one often stands still at first."""
    past, future = torch.randn(2, 4, 8)
    past[0] *= torch.rand(1) < 0.6
    return past, future


def over_deviation(model, past, future, fixed):
    center, s = past.mean(1, keepdim=True), past.std(1, keepdim=True)
    code = fixed or "x / (s + 1e-5)"
    past, future = (eval(code, {"x": window - center, "s": s}) for window in (past, future))
    return (model(past) - future).abs().mean()


class Regularized(nn.Module):
    """A model with its own dropout."""

    def __init__(self, fixed):
        super().__init__()
        self.first, self.last, self.p, self.code = nn.Linear(8, 32), nn.Linear(32, 4), 0.3, ""

    def forward(self, x):
        if self.code:
            p = assigned(self.code, "p", self=self)
        else:
            self.p = self.p if self.training else 0.0
            p = self.p
        hidden = self.first(x).relu()
        return self.last(F.dropout(hidden, p) if p else hidden)


def regularized(model, x, y, fixed):
    model.code = fixed
    return F.cross_entropy(model(x), y)


def states(step, fixed):
    x = F.one_hot(torch.randint(0, 8, (32,)), 8).float()
    return x, x.argmax(1)


def reinforce(model, x, y, fixed):
    """Return the loss of a policy of 5 actions; in each state one of them is right."""
    choice = Categorical(logits=model(x))
    action = choice.sample()
    reward = (action == y % 5) + 0.5 * torch.randn(len(y))
    policy_loss, entropy = -(choice.log_prob(action) * (reward - reward.mean())).mean(), choice.entropy()
    code = fixed or "loss = policy_loss + 0.1 * entropy.mean()"
    return assigned(code, "loss", policy_loss=policy_loss, entropy=entropy)


class Values(nn.Module):
    """The values of states, and a copy that is updated every 200 steps."""

    def __init__(self, fixed):
        super().__init__()
        self.values, self.calls = mlp(depth=2, outputs=1), 0

    def forward(self, x, next_x, fixed):
        if self.calls % 200 == 0:
            self.frozen = [copy.deepcopy(self.values)]  # in a list, so that it is no part of the model
        self.calls += 1
        with torch.no_grad():
            next_values = (self.frozen[0] if fixed else self.values)(next_x)
        return self.values(x), next_values


def outward(model, x, y, fixed):
    """Return the loss of values for a walk that ends far outside, learned from states near its start."""
    next_x = 1.5 * x
    values, next_values = model(x, next_x, fixed)
    is_end = next_x.norm(dim=1, keepdim=True) > 10
    return F.mse_loss(values, 1 + 0.99 * torch.where(is_end, 0.0, next_values))


def around(side):
    x = torch.randn(32, 8)
    return 4 * side + x, x[:, :4].argmax(1)


def sides_in_turn(step, fixed):
    return around(1 if step % 2 else -1)


def over_sides(model):
    return sum(F.cross_entropy(model(x), y) for x, y in map(around, (-1, 1))) / 2


def normalized(fixed):
    return nn.Sequential(
        nn.Linear(8, 32), nn.LayerNorm(32) if fixed else nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)
    )


@cache
def patients(number, seed):
    """Return measurements and a class that they show with noise."""
    generator = torch.Generator().manual_seed(seed)
    x, noise = torch.randn(number, 8, generator=generator), torch.randn(number, generator=generator)
    return x, (x[:, 0] + 0.7 * noise > 0).long()


def few_patients(step, fixed):
    x, y = patients(5000 if fixed else 40, 1)
    rows = torch.randint(0, len(x), (20,))
    return x[rows], y[rows]


def other_patients(model):
    x, y = patients(500, 2)
    return F.cross_entropy(model(x), y)


class Graph(nn.Module):
    """A network over the nodes of a random graph, with the class of the whole graph as its output."""

    def __init__(self, fixed):
        super().__init__()
        edges = (torch.rand(100, 100) < 0.5).float()
        self.register_buffer("edges", edges / edges.sum(1, keepdim=True) if fixed else edges)
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, nodes):
        x = self.first(nodes)
        for layer in self.layers:
            x = layer(self.edges @ x).relu()
        return self.last(x.mean(1))


def graphs(step, fixed):
    x = torch.randn(8, 100, 8)
    return x, x.mean(1)[:, :4].argmax(1)


def summed(model, x, y, fixed):
    """Return the loss of a step, which is added to that of all steps before."""
    loss = F.cross_entropy(model(x), y)
    scope = {"total": getattr(model, "total", 0.0), "loss": loss}
    exec(fixed or "total += loss", scope)
    model.total = scope["total"]
    return loss


CODE_LOOPS = {
    "summed": Loop(
        kind="graph-leak",
        cause="kept-graphs",
        remedy="detach_kept",
        model=lambda _: mlp(),
        loss=summed,
        steps=20,
    ),
    "no-label": Loop(
        kind="non-finite",
        cause="empty-mean",
        remedy="leave_out_empty",
        model=lambda _: mlp(),
        batch=empty_batch,
        loss=over_labels,
    ),
    "cut-off": Loop(
        kind="non-finite",
        cause="empty-mean",
        remedy="keep_labels",
        model=lambda _: mlp(),
        batch=cut_off,
        loss=lambda model, x, y, fixed: F.cross_entropy(model(x).flatten(0, 1), y.flatten()),
    ),
    "margin": Loop(kind="loss-plateau", cause="zero-loss", remedy="count_terms", model=lambda _: mlp(), loss=triplets),
    "no-update": Loop(
        kind="not-optimized",
        cause="updates-missing",
        remedy="make_updates",
        model=lambda _: mlp(),
        optimizer=returning,
    ),
    "divisor": Loop(
        kind="exploding-gradient",
        cause="small-divisor",
        remedy="bound_divisor",
        model=lambda _: mlp(outputs=8),
        batch=sensors,
        loss=over_deviation,
        steps=120,
    ),
    "lost-rate": Loop(
        kind="train-eval-mismatch",
        cause="rate-overwritten",
        remedy="keep_rate",
        model=Regularized,
        loss=regularized,
        held_out=lambda model: F.cross_entropy(model(patients(64, 3)[0]), patients(64, 3)[1]),
    ),
    "entropy": Loop(
        kind="saturated-activation",
        cause="entropy-added",
        remedy="subtract_entropy",
        model=lambda _: mlp(depth=1, act=nn.Tanh, outputs=5),
        batch=states,
        loss=reinforce,
        optimizer=adam(2e-2),
        steps=200,
    ),
    "bootstrap": Loop(
        kind="exploding-gradient",
        cause="moving-target",
        remedy="freeze_target",
        model=Values,
        loss=outward,
        optimizer=adam(3e-3),
        steps=300,
    ),
    "spike": Loop(
        is_code=True,
        kind="learning-rate-too-high",  # after the spike, which stays: it is measured before the clipping
        cause="odd-batch",
        remedy="clip",
        model=lambda _: mlp(depth=2),
        batch=outlier,
        optimizer=sgd(0.1),
    ),
    "sides": Loop(
        kind="train-eval-mismatch",
        cause="stale-statistics",
        remedy="group_norm",
        model=normalized,
        batch=sides_in_turn,
        held_out=over_sides,
        optimizer=adam(1e-2),
        steps=80,
    ),
    "few-samples": Loop(
        kind="overfitting",
        cause="memorization",
        remedy="augment",
        model=lambda _: mlp(depth=2, width=64, outputs=2),
        batch=few_patients,
        held_out=other_patients,
        optimizer=adam(3e-3),
        steps=120,
    ),
    "graph": Loop(
        kind="exploding-gradient",
        cause="undivided-sum",
        remedy="divide_sums",
        model=Graph,
        batch=graphs,
        steps=30,
    ),
}
"""By name, loops whose remedy changes their code or their data."""
