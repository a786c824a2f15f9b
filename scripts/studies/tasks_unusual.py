"""Small trainings that are fine and look odd, by family: further tasks of `studies/false_alarms.py`."""

# B = samples of a batch, N = samples, C = channels

from __future__ import annotations

import copy
import math
import random

import torch
from tasks import ACTIVATIONS, Task, characters, convolutions, draw, images, passages
from torch import Tensor, nn
from torch.nn import functional


class Factors(nn.Module):
    """Users and items as vectors whose product is a rating."""

    def __init__(self, users: int, items: int, width: int, *, is_sparse: bool) -> None:
        super().__init__()
        self.user = nn.Embedding(users, width, sparse=is_sparse)
        self.item = nn.Embedding(items, width, sparse=is_sparse)
        self.user_bias = nn.Embedding(users, 1, sparse=is_sparse)
        nn.init.normal_(self.user.weight, std=0.1)
        nn.init.normal_(self.item.weight, std=0.1)
        nn.init.zeros_(self.user_bias.weight)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        """Return a rating for each pair."""
        rating: Tensor = (self.user(user) * self.item(item)).sum(1) + self.user_bias(user)[:, 0]
        return rating


def factorisation(rng: random.Random, size: int) -> Task:
    """Matrix factorisation of made-up ratings, with dense or sparse gradients."""
    user, item = torch.randint(300, (8000,)), torch.randint(200, (8000,))
    taste, kind = torch.randn(300, 4), torch.randn(200, 4)
    rating = (taste[user] * kind[item]).sum(1) / 2 + 0.3 * torch.randn(8000)
    model = Factors(300, 200, rng.choice([8, 16]), is_sparse=False)

    def loss() -> tuple[Tensor, Tensor]:
        a, b, r = draw(max(size, 64), user, item, rating)
        return functional.mse_loss(model(a, b), r), torch.stack([a, b])

    return Task(model=model, loss=loss, rate=2e-2, sgd_rate=2.0)


class Clicks(nn.Module):
    """Embeddings of rare categories beside dense features, as recommenders have them."""

    def __init__(self, sizes: tuple[int, ...], dense: int) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(n, 8) for n in sizes)
        self.body = nn.Sequential(nn.Linear(8 * len(sizes) + dense, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, categories: Tensor, dense: Tensor) -> Tensor:
        """Return a logit for each sample."""
        looked_up = [e(categories[:, i]) for i, e in enumerate(self.embeddings)]
        return self.body(torch.cat([*looked_up, dense], 1))[:, 0]  # type: ignore[no-any-return]


def clicks(rng: random.Random, size: int) -> Task:
    """Click prediction with long-tailed categories: most rows of an embedding get no gradient in a step."""
    sizes, n = (2000, 500, 50), 20_000
    categories = torch.stack([(torch.rand(n) ** 3 * s).long() for s in sizes], 1)
    dense = torch.randn(n, 6)
    clicked = (dense[:, 0] - dense[:, 1] * dense[:, 2] + torch.randn(2000)[categories[:, 0]] > 0).float()
    model = Clicks(sizes, 6)

    def loss() -> tuple[Tensor, Tensor]:
        a, b, y = draw(max(size, 64), categories, dense, clicked)
        return functional.binary_cross_entropy_with_logits(model(a, b), y), b

    return Task(model=model, loss=loss, rate=3e-3, sgd_rate=0.3)


def autoencoder(rng: random.Random, size: int) -> Task:
    """An autoencoder of digits with a loss that is a mean or a sum, sometimes fed with noise."""
    x, kind, reduction, noise = (
        images()[0].flatten(1),
        rng.choice(ACTIVATIONS),
        rng.choice(["mean", "sum"]),
        rng.choice([0, 0.2]),
    )
    encoder = [nn.Linear(64, 128), kind(), nn.Linear(128, 16)]
    model = nn.Sequential(*encoder, nn.Linear(16, 128), kind(), nn.Linear(128, 64))

    def loss() -> tuple[Tensor, Tensor]:
        (a,) = draw(max(size, 16), x)
        return functional.mse_loss(model(a + noise * torch.randn_like(a)), a, reduction=reduction), a

    return Task(model=model, loss=loss, sgd_rate=None)


class Variational(nn.Module):
    """A variational autoencoder."""

    def __init__(self, latent: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 128), nn.ReLU())
        self.mean, self.log_variance = nn.Linear(128, latent), nn.Linear(128, latent)
        self.decoder = nn.Sequential(nn.Linear(latent, 128), nn.ReLU(), nn.Linear(128, 64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits of the pixels and the divergence from the prior, per sample."""
        h = self.encoder(x)
        mean, log_variance = self.mean(h), self.log_variance(h)
        z = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        return self.decoder(z), 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).sum(1)


def variational(rng: random.Random, size: int) -> Task:
    """A variational autoencoder of digits, whose divergence may be faded in."""
    x, model, beta, fades = (
        images()[0].flatten(1),
        Variational(rng.choice([2, 8])),
        rng.choice([0.5, 1.0]),
        rng.random() < 0.5,
    )
    calls = 0

    def loss() -> tuple[Tensor, Tensor]:
        nonlocal calls
        calls += 1
        (a,) = draw(max(size, 16), x)
        logits, divergence = model(a)
        weight = beta * (min(1.0, calls / 100) if fades else 1.0)
        return functional.binary_cross_entropy_with_logits(logits, a, reduction="none").sum(1).mean() + (
            weight * divergence
        ).mean(), a

    return Task(model=model, loss=loss, sgd_rate=1e-3)


def contrastive(rng: random.Random, size: int) -> Task:
    """An encoder whose two noisy views of a digit must find each other, or a triplet that keeps its margin."""
    x, y = images()
    x, is_triplet = x.flatten(1), rng.random() < 0.5
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 32))

    def loss() -> tuple[Tensor, Tensor]:
        a, label = draw(max(size, 32), x, y)
        if is_triplet:
            like = x[(label[:, None] == y).float().multinomial(1)[:, 0]]
            unlike = x[(label[:, None] != y).float().multinomial(1)[:, 0]]
            return functional.triplet_margin_loss(model(a), model(like), model(unlike), margin=1.0), a
        one, other = (functional.normalize(model(a + 0.1 * torch.randn_like(a)), dim=1) for _ in range(2))
        return functional.cross_entropy(one @ other.T / 0.1, torch.arange(len(a))), a

    return Task(model=model, loss=loss, is_half_safe=False)


class Experts(nn.Module):
    """A layer of experts of which each sample takes one."""

    def __init__(self, experts: int, width: int = 64) -> None:
        super().__init__()
        self.first, self.gate = nn.Linear(64, width), nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)) for _ in range(experts)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits, and how unevenly the experts are used."""
        h = torch.relu(self.first(x))
        share = self.gate(h).softmax(-1)
        weight, chosen = share.max(-1)
        out = torch.zeros_like(h)
        for i, expert in enumerate(self.experts):
            mine = (chosen == i).nonzero()[:, 0]
            if len(mine):
                out = out.index_put((mine,), weight[mine, None] * expert(h[mine]))
        used = functional.one_hot(chosen, len(self.experts)).float().mean(0)
        return self.head(h + out), len(self.experts) * (share.mean(0) * used).sum()


def experts(rng: random.Random, size: int) -> Task:
    """A mixture of experts on digits: in small batches some of them get no sample."""
    x, y = images()
    model, x = Experts(rng.choice([4, 6])), x.flatten(1)

    def loss() -> tuple[Tensor, Tensor]:
        a, b = draw(size, x, y)
        logits, unevenness = model(a)
        return functional.cross_entropy(logits, b) + 0.1 * unevenness, a

    return Task(model=model, loss=loss, is_half_safe=False)


def finetuning(rng: random.Random, size: int) -> Task:
    """A network that has learned five digits learns all ten, some of its first layers frozen."""
    x, y = images()
    model = convolutions(rng, size).model
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    for _ in range(60):
        a, b = draw(64, x[y < 5], y[y < 5])
        optimizer.zero_grad()
        functional.cross_entropy(model(a), b).backward()
        optimizer.step()
    model.zero_grad()
    if rng.random() < 0.6:
        for p in list(model.parameters())[: rng.randint(1, 4)]:
            p.requires_grad_(False)

    def loss() -> tuple[Tensor, Tensor]:
        a, b = draw(min(size, 64), x, y)
        return functional.cross_entropy(model(a), b), a

    return Task(model=model, loss=loss)


class Graph(nn.Module):
    """Two graph convolutions, normalised by degree."""

    def __init__(self, adjacency: Tensor, features: int) -> None:
        super().__init__()
        degree = adjacency.sum(1)
        self.register_buffer("spread", adjacency / torch.sqrt(degree[:, None] * degree))
        self.first, self.second = nn.Linear(features, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits for every node."""
        spread = self.get_buffer("spread")
        return spread @ self.second(torch.relu(spread @ self.first(x)))  # type: ignore[no-any-return]


def graph(rng: random.Random, size: int) -> Task:
    """A graph network on communities, all nodes at every step: the whole data set is one batch."""
    label = torch.randint(4, (300,))
    likely = torch.where(label[:, None] == label, 0.06, 0.01)
    edges = (torch.rand(300, 300) < likely).float().triu(1)
    features = torch.randn(300, 16) + 0.7 * functional.one_hot(label, 16).float()
    model = Graph(edges + edges.T + torch.eye(300), 16)
    known = torch.randperm(300)[:150]

    def loss() -> tuple[Tensor, Tensor]:
        return functional.cross_entropy(model(features)[known], label[known]), features

    return Task(model=model, loss=loss, rate=1e-2, sgd_rate=0.5, is_half_safe=False)


def denoiser(rng: random.Random, size: int) -> Task:
    """A diffusion model of digits: predict the noise at a random noise level, whose loss is noisy itself."""
    x = 2 * images()[0].flatten(1) - 1
    model = nn.Sequential(nn.Linear(65, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 64))

    def loss() -> tuple[Tensor, Tensor]:
        (a,) = draw(max(size, 16), x)
        time, noise = torch.rand(len(a), 1), torch.randn_like(a)
        mixed = torch.cos(math.pi / 2 * time) * a + torch.sin(math.pi / 2 * time) * noise
        return functional.mse_loss(model(torch.cat([mixed, time], 1)), noise), a

    return Task(model=model, loss=loss, sgd_rate=0.05)


def policy_gradient(rng: random.Random, size: int) -> Task:
    """REINFORCE with a baseline on a bandit with contexts: the loss says nothing about what was learned."""
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 5))
    value, best, baseline = torch.randn(8, 5), max(size, 32), 0.0

    def loss() -> tuple[Tensor, Tensor]:
        nonlocal baseline
        context = torch.randn(best, 8)
        choice = torch.distributions.Categorical(logits=model(context))
        action = choice.sample()
        reward = (context @ value).gather(1, action[:, None])[:, 0] + 0.5 * torch.randn(best)
        advantage, baseline = reward - baseline, 0.9 * baseline + 0.1 * float(reward.mean())
        return -(choice.log_prob(action) * advantage).mean() - 0.01 * choice.entropy().mean(), context

    return Task(model=model, loss=loss, rate=3e-3, sgd_rate=0.05, falls=False, is_half_safe=False)


def q_learning(rng: random.Random, size: int) -> Task:
    """Q-learning on a ring of states with a replay memory and a frozen target network, renewed now and then."""
    states, every = 16, rng.choice([10, 25, 50])
    model = nn.Sequential(nn.Linear(states, 64), nn.ReLU(), nn.Linear(64, 2))
    target, calls = copy.deepcopy(model).requires_grad_(False), 0
    place, move = torch.randint(states, (2000,)), torch.randint(2, (2000,))
    after = (place + 2 * move - 1) % states
    reward = (after == 0).float()

    def loss() -> tuple[Tensor, Tensor]:
        nonlocal calls
        if calls % every == 0:
            target.load_state_dict(model.state_dict())
        calls += 1
        s, a, n, r = draw(max(size, 32), place, move, after, reward)
        wanted = r + 0.9 * target(functional.one_hot(n, states).float()).max(1).values
        inputs = functional.one_hot(s, states).float()
        return functional.smooth_l1_loss(model(inputs).gather(1, a[:, None])[:, 0], wanted), inputs

    return Task(model=model, loss=loss, sgd_rate=0.1, falls=False, is_half_safe=False)


def physics(rng: random.Random, size: int) -> Task:
    """A network that solves y'' = -y by the residual of the equation, with gradients of gradients."""
    width = rng.choice([32, 64])
    model = nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))

    def loss() -> tuple[Tensor, Tensor]:
        t = (3 * torch.rand(max(size, 32), 1)).requires_grad_(True)
        y = model(t)
        (speed,) = torch.autograd.grad(y.sum(), t, create_graph=True)
        (force,) = torch.autograd.grad(speed.sum(), t, create_graph=True)
        t0 = torch.zeros(1, 1, requires_grad=True)
        (start,) = torch.autograd.grad(model(t0).sum(), t0, create_graph=True)
        edge = (model(t0) ** 2).sum() + ((start - 1) ** 2).sum()
        return ((force + y) ** 2).mean() + edge, t.detach()

    return Task(model=model, loss=loss, rate=3e-3, sgd_rate=None, is_half_safe=False)


class Reverser(nn.Module):
    """Reads a sequence with one recurrent network and writes it with another that attends to it."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.reader = nn.Embedding(vocabulary, 32), nn.GRU(32, 64, batch_first=True)
        self.writer, self.head = nn.GRU(32, 64, batch_first=True), nn.Linear(128, vocabulary)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return logits for each place of the output."""
        read, state = self.reader(self.tokens(x))
        written, _ = self.writer(self.tokens(y), state)
        looked_at = (written @ read.mT / 8).softmax(-1) @ read
        return self.head(torch.cat([written, looked_at], -1))  # type: ignore[no-any-return]


def reversal(rng: random.Random, size: int) -> Task:
    """A sequence is written backwards by an encoder and a decoder with attention."""
    _, vocabulary = characters()
    model = Reverser(vocabulary)

    def loss() -> tuple[Tensor, Tensor]:
        x, _ = passages(max(size, 16), 8)
        y = x.flip(1)
        before = torch.cat([torch.zeros_like(y[:, :1]), y[:, :-1]], 1)
        return functional.cross_entropy(model(x, before).flatten(0, 1), y.flatten()), x

    return Task(model=model, loss=loss, rate=3e-3, sgd_rate=None)
