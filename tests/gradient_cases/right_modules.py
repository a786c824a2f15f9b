"""Right modules that naive checkers fail: kinks, ties, randomness, batch statistics, formats, detours of the graph."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradient_cases.planting import right
from gradient_cases.wrong_functions import squares
from gradient_cases.wrong_steps import Tied, TwoLayers, classifier, labelled


class Of(nn.Module):
    """Apply a function to the output of a linear layer."""

    def __init__(self, function, wide=6):
        super().__init__()
        self.first, self.function = nn.Linear(4, wide), function

    def forward(self, x):
        return self.function(self.first(x))


def of(function, wide=6, batch=6):
    return Of(function, wide), (torch.randn(batch, 4),), squares


@right
def relu_at_zero():
    net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))
    nn.init.zeros_(net[0].weight)
    nn.init.zeros_(net[0].bias)
    return net, (torch.randn(6, 4),), squares


@right
def absolute_values_at_zero():
    return Tied(), (torch.zeros(3, 5),), lambda out: out.abs().sum()


@right
def ties_of_max_pooling():
    x = torch.randint(0, 2, (2, 1, 6, 6)).float()
    return nn.Sequential(nn.Conv2d(1, 2, 1), nn.MaxPool2d(2)), (x.requires_grad_(),), squares


@right
def sorted_values_with_ties():
    x = torch.ones(5, 6)
    return nn.LayerNorm(6), (x.requires_grad_(),), lambda out: (out.sort(-1).values * torch.arange(6)).sum()


@right
def clamp_at_its_bound():
    x = torch.tensor([[1.0, -1.0, 0.3, 2.0]])
    return nn.Identity(), (x.requires_grad_(),), lambda out: out.clamp(-1, 1).pow(2).sum()


@right
def dropout_in_training():
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2)), (torch.randn(6, 4),), squares


@right
def batch_norm_in_training():
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(27, 2))
    return net, (torch.randn(6, 2, 5, 5),), squares


@right
def batch_norm_in_evaluation():
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))
    return net.eval(), (torch.randn(6, 4, requires_grad=True),), squares


@right
def spectral_norm_in_training():
    layer = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(4, 5))
    return layer, (torch.randn(6, 4),), squares


@right
def weight_norm():
    return torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 5)), (torch.randn(6, 4),), squares


@right
def straight_through_by_detach():
    return of(lambda h: h + (torch.round(h) - h).detach())


@right
def largest_value_detached_in_a_softmax():
    def softmax(h):
        e = (h - h.amax(-1, keepdim=True).detach()).exp()
        return e / e.sum(-1, keepdim=True)

    return of(softmax)


@right
def large_offset():
    net = nn.Linear(4, 3)
    nn.init.constant_(net.bias, 1e4)
    return net, (torch.randn(6, 4),), lambda out: out.var(0).sum()


@right
def large_loss():
    return nn.Linear(4, 3), (1e3 * torch.randn(6, 4),), lambda out: 1e6 * squares(out)


@right
def vanishing_gradient():
    layers = [layer for _ in range(12) for layer in (nn.Linear(4, 4), nn.Sigmoid())]
    return nn.Sequential(*layers), (torch.randn(6, 4),), squares


@right
def dead_units():
    net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))
    nn.init.constant_(net[0].bias, -50.0)
    return net, (torch.randn(6, 4),), squares


@right
def bias_before_batch_norm():
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh()), (torch.randn(8, 4),), squares


@right
def sparse_embedding():
    index = torch.tensor([[0, 2, 2], [5, 0, 1]])
    return nn.Embedding(7, 4, sparse=True), (index,), squares


@right
def complex_weights():
    class Rotation(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.cfloat))

        def forward(self, x):
            return (x.to(self.weight.dtype) @ self.weight).abs()

    return Rotation(), (torch.randn(6, 4),), squares


@right
def recurrent_network():
    return nn.LSTM(4, 5, batch_first=True), (torch.randn(3, 6, 4),), lambda out: squares(out[0])


@right
def attention():
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (torch.randn(3, 5, 8),), squares


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first, self.second = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.3), nn.Tanh()), nn.Linear(6, 2)
        self.reentrant = reentrant

    def forward(self, x):
        return self.second(checkpoint(self.first, x, use_reentrant=self.reentrant))


@right
def checkpoint_with_dropout():
    return Checkpointed(False), (torch.randn(6, 4),), squares


@right
def reentrant_checkpoint():
    return Checkpointed(True), (torch.randn(6, 4, requires_grad=True),), squares


def penalized(model, batch):
    x = batch[0].detach().requires_grad_()
    model.zero_grad()
    loss = F.cross_entropy(model(x), batch[1])
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    total = loss + slope.pow(2).sum()
    total.backward()
    return total.detach()


@right
def step_with_a_gradient_penalty():
    return penalized, classifier(), labelled()


def accumulated(model, batch, parts=3):
    model.zero_grad()
    total = 0.0
    for x, y in zip(batch[0].chunk(parts), batch[1].chunk(parts), strict=True):
        loss = F.cross_entropy(model(x), y) * len(x) / len(batch[0])
        loss.backward()
        total = total + loss.detach()
    return total


@right
def accumulation_over_unequal_parts():
    return accumulated, classifier(), labelled(8)


def by_hand(model, batch):
    x, y = batch
    hidden = torch.tanh(x @ model.w1 + model.b1)
    error = hidden @ model.w2 + model.b2 - y
    delta = 2 * error / error.numel()
    back = (delta @ model.w2.t()) * (1 - hidden**2)
    model.w2.grad, model.b2.grad = hidden.t() @ delta, delta.sum(0)
    model.w1.grad, model.b1.grad = x.t() @ back, back.sum(0)
    return error.pow(2).mean().detach()


@right
def backprop_by_hand():
    return by_hand, TwoLayers(), (torch.randn(8, 4), torch.randn(8, 2))


def bootstrapped(model, batch):
    now, later = batch
    with torch.no_grad():
        target = 0.9 * model(later).max(-1).values
    loss = (model(now)[:, 0] - target).pow(2).mean()
    model.zero_grad()
    loss.backward()
    return loss


@right
def target_without_a_graph():
    return bootstrapped, classifier(), (torch.randn(6, 4), torch.randn(6, 4))


def mixed(model, batch):
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    return loss.detach()


@right
def step_under_autocast():
    return mixed, classifier(), labelled()


class UpcastNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.gain = nn.Linear(4, 5), nn.Parameter(torch.ones(5))

    def forward(self, x):
        h = self.first(x)
        return (h.float() * torch.rsqrt(h.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(h.dtype) * self.gain


@right
def norm_that_computes_in_float32():
    return UpcastNorm(), (torch.randn(6, 4),), lambda out: out.sin().sum()


@right
def targets_in_float32():
    target = torch.randn(6, 3)
    return nn.Linear(4, 3), (torch.randn(6, 4),), lambda out: F.mse_loss(out, target)


@right
def huber_loss_at_its_corner():
    x = torch.tensor([[1.0], [-1.0], [0.0], [3.0]])
    return nn.Linear(1, 1), (x,), lambda out: F.huber_loss(out, torch.zeros_like(out))


@right
def median_of_a_batch():
    return of(lambda h: h.median(0).values)


@right
def cosine_of_pairs():
    return of(lambda h: F.cosine_similarity(h, h.roll(1, 0)))


@right
def product_with_a_zero():
    x = torch.randn(4, 4)
    x[:, 1] = 0
    return nn.Identity(), (x.requires_grad_(),), lambda out: out.prod(-1).sum() + out.cumprod(-1).sum()


@right
def eigenvalues():
    return of(lambda h: torch.linalg.eigvalsh(h.t() @ h))


@right
def counted_calls():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.calls = nn.Linear(4, 3), 0

        def forward(self, x):
            self.calls += 1
            return self.first(x) / self.calls

    return Counts(), (torch.randn(5, 4),), squares


@right
def frozen_first_layer():
    net = classifier()
    net[0].requires_grad_(False)
    return net, (torch.randn(6, 4),), squares


@right
def hook_that_only_looks():
    net = classifier()
    norms = []
    net[0].weight.register_hook(lambda g: norms.append(g.norm()))
    return net, (torch.randn(6, 4),), squares


@right
def gelu_of_a_large_network():
    net = nn.Sequential(nn.Linear(4, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 2))
    return net, (torch.randn(16, 4),), squares


@right
def many_kinks():
    net = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
    return net, (torch.randn(32, 4),), squares


def bootstrapped_by_detach(model, batch):
    now, later = batch
    target = 0.9 * model(later).max(-1).values.detach()
    loss = (model(now)[:, 0] - target).pow(2).mean()
    model.zero_grad()
    loss.backward()
    return loss.detach()


@right
def target_that_is_detached():
    return bootstrapped_by_detach, classifier(), (torch.randn(6, 4), torch.randn(6, 4))
