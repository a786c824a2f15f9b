"""Physics, graphs, reinforcement learning, recommenders, implicit fields, meta-learning. All of these runs are fine."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from scripts.fault_zoo.cases.healthy_data import cartpole_step, digits, shuffled
from scripts.fault_zoo.protocol import Attach, case


@case(
    source="GCN, Kipf & Welling 2017: semi-supervised, full batch",
    tags=("gnn", "full-batch", "overfit-gap"),
    tolerate=("constant-batch",),
)
def gcn_full_batch(attach: Attach) -> None:
    """Node classification on one graph: the whole graph is the batch at each step, only 5% of the nodes have labels."""
    torch.manual_seed(1)
    rng = np.random.RandomState(1)
    n, classes = 900, 5
    label = rng.randint(0, classes, n)
    p = np.where(label[:, None] == label[None], 0.03, 0.004)
    a = (rng.rand(n, n) < p).astype("float32")
    a = np.triu(a, 1)
    a = a + a.T + np.eye(n, dtype="float32")
    d = a.sum(1) ** -0.5
    adjacency = torch.tensor(d[:, None] * a * d[None])
    features = torch.tensor((rng.normal(size=(classes, 64))[label] * 0.4 + rng.normal(size=(n, 64))).astype("float32"))
    y = torch.tensor(label)
    train = torch.tensor(rng.permutation(n)[:150])
    rest = torch.tensor(np.setdiff1d(np.arange(n), train.numpy()))

    class GCN(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin1, self.lin2 = nn.Linear(64, 48), nn.Linear(48, classes)
            self.dropout = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            x = F.relu(adjacency @ self.lin1(self.dropout(x)))
            return adjacency @ self.lin2(self.dropout(x))

    model = GCN()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    loss_fn = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=loss_fn)
    for _ in range(250):
        loss = loss_fn(model(features)[train], y[train])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=features)
    model.eval()
    assert (model(features)[rest].argmax(1) == y[rest]).float().mean() > 0.85


@case(
    source="DQN, Mnih et al. 2015: replay buffer, target network, Huber loss",
    tags=("rl", "dqn", "rising-loss", "clipping"),
    tolerate=("loss-plateau",),
)
def dqn_loss_rises_with_value(attach: Attach) -> None:
    """Q-learning: as the values grow from 0 towards the true return the TD loss rises and bumps at each target update.
    The agent improves.
    """
    torch.manual_seed(3)
    import random

    random.seed(3)
    model = nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))
    target = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    monitor = attach(model, optimizer)
    buffer, lengths, current = [], [], torch.zeros(8)
    state = 0.05 * (torch.rand(8, 4) * 2 - 1)
    for step in range(600):
        epsilon = max(0.05, 1 - step / 300)
        for _ in range(4):
            with torch.no_grad():
                action = torch.where(torch.rand(8) < epsilon, torch.randint(0, 2, (8,)), model(state).argmax(1))
            new, fell = cartpole_step(state, action)
            buffer += list(zip(state, action, new, fell, strict=False))
            current += 1
            done = fell | (current >= 200)
            lengths += current[done].tolist()
            new = torch.where(done[:, None], 0.05 * (torch.rand(8, 4) * 2 - 1), new)
            current = torch.where(done, torch.zeros(8), current)
            state = new
        s, a, n, f = (torch.stack(c) for c in zip(*random.sample(buffer, min(len(buffer), 96)), strict=False))
        with torch.no_grad():
            goal = 1 + 0.98 * (~f) * target(n).max(1).values
        loss = F.smooth_l1_loss(model(s).gather(1, a[:, None]).squeeze(1), goal)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        if step % 40 == 39:
            target.load_state_dict(model.state_dict())
        monitor.step(loss, batch=s)
    assert sum(lengths[-10:]) / 10 > 3 * sum(lengths[:30]) / 30, (lengths[:5], lengths[-5:])


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh())
        self.policy, self.value = nn.Linear(96, 2), nn.Linear(96, 1)

    def forward(self, s: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(s)
        return self.policy(h), self.value(h).squeeze(-1)


@case(
    source="PPO, Schulman et al. 2017: clipped objective, several epochs per rollout",
    tags=("rl", "ppo", "clipping", "natural-zeros"),
    tolerate=("loss-plateau",),
)
def ppo_cartpole(attach: Attach) -> None:
    """PPO: within a rollout the clipped ratio zeroes a part of the gradients; the value loss grows with the returns.
    Rewards go up.
    """
    torch.manual_seed(4)
    model = ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-5)
    monitor = attach(model, optimizer)
    n, horizon = 16, 64
    state, age, lengths = 0.05 * (torch.rand(n, 4) * 2 - 1), torch.zeros(n), []
    for _ in range(18):
        S: Any = []
        A: Any = []
        P: Any = []
        V: Any = []
        D: Any = []
        for _ in range(horizon):
            with torch.no_grad():
                logits, value = model(state)
                policy = torch.distributions.Categorical(logits=logits)
                action = policy.sample()
            new, fell = cartpole_step(state, action)
            S.append(state)
            A.append(action)
            P.append(policy.log_prob(action))
            V.append(value)
            D.append(fell.float())
            age += 1
            lengths += age[fell].tolist()
            age = torch.where(fell, torch.zeros(n), age)
            state = torch.where(fell[:, None], 0.05 * (torch.rand(n, 4) * 2 - 1), new)
        with torch.no_grad():
            last = model(state)[1]
        S, A, P, V, D = torch.stack(S), torch.stack(A), torch.stack(P), torch.stack(V), torch.stack(D)
        advantage, running = torch.zeros_like(V), torch.zeros(n)
        for t in reversed(range(horizon)):
            following = last if t == horizon - 1 else V[t + 1]
            delta = 1 + 0.98 * following * (1 - D[t]) - V[t]
            running = delta + 0.98 * 0.95 * (1 - D[t]) * running
            advantage[t] = running
        returns = advantage + V
        S, A, P, advantage, returns = S.flatten(0, 1), A.flatten(), P.flatten(), advantage.flatten(), returns.flatten()
        for _ in range(4):
            for idx in torch.randperm(n * horizon).split(256):
                logits, value = model(S[idx])
                policy = torch.distributions.Categorical(logits=logits)
                ratio = (policy.log_prob(A[idx]) - P[idx]).exp()
                adv = (advantage[idx] - advantage[idx].mean()) / (advantage[idx].std() + 1e-8)
                surrogate = torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
                loss = -surrogate + 0.5 * F.mse_loss(value, returns[idx]) - 0.01 * policy.entropy().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                monitor.step(loss, batch=S[idx])
    alive = [*lengths[-15:], *age.tolist()]
    assert sum(alive) / len(alive) > 3 * sum(lengths[:30]) / 30, (lengths[:5], alive)


class NeuralCF(nn.Module):
    def __init__(self, users: int, items: int, dim: int = 24) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(users, dim), nn.Embedding(items, dim)
        self.bias = nn.Embedding(items, 1)
        nn.init.normal_(self.user.weight, std=0.05)
        nn.init.normal_(self.item.weight, std=0.05)
        nn.init.zeros_(self.bias.weight)
        self.mlp = nn.Sequential(nn.Linear(2 * dim, 96), nn.ReLU(), nn.Linear(96, 48), nn.ReLU(), nn.Linear(48, 1))

    def forward(self, u: Tensor, i: Tensor) -> Tensor:
        a, b = self.user(u), self.item(i)
        return (a * b).sum(-1) + self.mlp(torch.cat([a, b], -1)).squeeze(-1) + self.bias(i).squeeze(-1)


@case(
    source="neural collaborative filtering with BPR and popularity bias",
    tags=("recommender", "embedding", "natural-zeros"),
    tolerate=("no-gradient",),
)
def recommender_bpr(attach: Attach) -> None:
    """Implicit feedback with sampled negatives: most users and items are absent from a batch; the last bias cancels in
    the difference.
    """
    torch.manual_seed(5)
    rng = np.random.RandomState(5)
    users, items, k = 1500, 2000, 6
    pu, qi = rng.normal(size=(users, k)), rng.normal(size=(items, k))
    popular = -0.9 * np.log(np.arange(1, items + 1))
    pairs: Any = []
    for user in range(users):
        score = 1.5 * pu[user] @ qi.T + popular + rng.gumbel(size=items)
        pairs += [(user, i) for i in np.argpartition(-score, 15)[:15]]
    pairs = torch.tensor(np.array(pairs))
    order = torch.from_numpy(rng.permutation(len(pairs)))
    test, pairs = pairs[order[:2000]], pairs[order[2000:]]
    model = NeuralCF(users, items)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    monitor = attach(model, optimizer)
    loader = shuffled(len(pairs), 256, seed=5)
    for _ in range(400):
        u, i = pairs[next(loader)].T
        j = torch.randint(0, items, i.shape)
        loss = -F.logsigmoid(model(u, i) - model(u, j)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=u)
    with torch.no_grad():
        u, i = test.T
        wins = (model(u, i) > model(u, torch.randint(0, items, i.shape))).float().mean()
    assert wins > 0.85, wins


class Siren(nn.Module):
    def __init__(self, width: int = 96, omega: float = 30.0) -> None:
        super().__init__()
        self.omega = omega
        self.layers = nn.ModuleList([nn.Linear(2, width), nn.Linear(width, width), nn.Linear(width, width)])
        self.out = nn.Linear(width, 1)
        with torch.no_grad():
            first: Any = self.layers[0]
            first.weight.uniform_(-1 / 2, 1 / 2)
            for layer in [*self.layers[1:], self.out]:
                bound = math.sqrt(6 / width) / omega
                layer.weight.uniform_(-bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.sin(self.omega * layer(x))
        return self.out(x)


@case(
    source="SIREN, Sitzmann et al. 2020: omega 30, uniform(-sqrt(6/n)/30, ...)",
    tags=("implicit", "full-batch", "scale-spread"),
    tolerate=("constant-batch",),
)
def siren_image_fit(attach: Attach) -> None:
    """A sine network fits one image: tiny initial weights times 30, gradients of very different size per layer, the
    same pixels each step.
    """
    torch.manual_seed(6)
    tiles = digits()[0][:25].reshape(5, 5, 8, 8).permute(0, 2, 1, 3).reshape(1, 1, 40, 40)
    picture = F.avg_pool2d(tiles, 3, 1, 1)[0, 0]
    axis = torch.linspace(-1, 1, 40)
    points = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2)
    target = picture.reshape(-1, 1)
    model = Siren()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 300)
    monitor = attach(model, optimizer, loss_fn=F.mse_loss)
    for _ in range(300):
        loss = F.mse_loss(model(points), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        monitor.step(loss, batch=points)
    assert loss.item() < 0.05 * target.var(), loss.item()


@case(source="MAML on sinusoids, Finn et al. 2017", tags=("meta-learning", "double-backward", "noisy"))
def maml_sinusoids(attach: Attach) -> None:
    """Second-order meta-learning: each step differentiates through an inner update on other tasks, so losses vary
    widely from step to step.
    """
    torch.manual_seed(8)
    from torch.func import functional_call

    model = nn.Sequential(nn.Linear(1, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor = attach(model, optimizer)
    history = []
    for _ in range(300):
        total: Any = 0
        for _ in range(4):
            amplitude, phase = torch.rand(()) * 4 + 0.5, torch.rand(()) * math.pi
            xs, xq = torch.rand(10, 1) * 10 - 5, torch.rand(20, 1) * 10 - 5
            fast: dict[str, Tensor] = dict(model.named_parameters())
            inner = F.mse_loss(functional_call(model, fast, (xs,)), amplitude * torch.sin(xs + phase))
            grads = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
            fast = {k: v - 0.01 * g for (k, v), g in zip(fast.items(), grads, strict=False)}
            total = total + F.mse_loss(functional_call(model, fast, (xq,)), amplitude * torch.sin(xq + phase))
        loss = total / 4
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        history.append(loss.item())
        monitor.step(loss)
    assert np.mean(history[-60:]) < 0.75 * np.mean(history[:30]), (np.mean(history[:30]), np.mean(history[-60:]))


@case(
    source="homoscedastic uncertainty weighting, Kendall et al. 2018",
    tags=("multi-task", "scalar-parameter", "negative-loss"),
)
def uncertainty_weighted_tasks(attach: Attach) -> None:
    """Learned log-variances weight three regressions of different scale: the loss turns negative, the scalars'
    gradients have their own scale.
    """
    torch.manual_seed(9)
    x = torch.randn(8000, 12)
    y = torch.stack([torch.sin(x[:, 0]) * 10, x[:, 1] * 0.1, torch.tanh(x[:, 2] + x[:, 3])], 1) + torch.tensor(
        [0.5, 0.01, 0.1]
    ) * torch.randn(8000, 3)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = nn.Sequential(nn.Linear(12, 256), nn.SiLU(), nn.Linear(256, 256), nn.SiLU())
            self.heads = nn.ModuleList(nn.Linear(256, 1) for _ in range(3))
            self.log_var = nn.Parameter(torch.zeros(3))

        def forward(self, x: Any) -> Any:
            h = self.trunk(x)
            return torch.cat([head(h) for head in self.heads], 1)

    model = Model()
    optimizer = torch.optim.Adam(
        [
            {"params": [p for n, p in model.named_parameters() if n != "log_var"], "lr": 2e-3},
            {"params": [model.log_var], "lr": 2e-2},
        ]
    )
    monitor = attach(model, optimizer)
    loader = shuffled(len(x), 128, seed=9)
    for _ in range(500):
        idx = next(loader)
        error = (model(x[idx]) - y[idx]).pow(2).mean(0)
        loss = (error * (-model.log_var).exp() + model.log_var).sum() / 2
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        monitor.step(loss, batch=x[idx])
    with torch.no_grad():
        r2 = 1 - (model(x) - y).pow(2).mean(0) / y.var(0)
    assert r2.min() > 0.75, r2


class Lion(torch.optim.Optimizer):
    def __init__(
        self,
        params: Iterator[Any],
        lr: float = 3e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(
                    torch.lerp(p.grad, m, b1).sign(), alpha=-group["lr"]
                )
                m.lerp_(p.grad, 1 - b2)


@case(
    source="Lion, Chen et al. 2023: sign updates; optimizer written in the script",
    tags=("optimizer", "custom", "regression"),
)
def custom_sign_optimizer(attach: Attach) -> None:
    """A hand-written optimizer with sign updates: the step size does not depend on the gradient at all."""
    torch.manual_seed(11)
    x = torch.rand(10000, 8)
    y = (
        10 * torch.sin(math.pi * x[:, 0] * x[:, 1])
        + 20 * (x[:, 2] - 0.5) ** 2
        + 10 * x[:, 3]
        + 5 * x[:, 4]
        + torch.randn(10000)
    )  # Friedman 1
    y = (y - y.mean()) / y.std()
    model = nn.Sequential(nn.Linear(8, 384), nn.GELU(), nn.Linear(384, 384), nn.GELU(), nn.Linear(384, 1))
    optimizer = Lion(model.parameters(), lr=1e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 450)
    monitor = attach(model, optimizer, loss_fn=F.mse_loss)
    loader = shuffled(9000, 128, seed=11)
    for _ in range(450):
        idx = next(loader)
        loss = F.mse_loss(model(x[idx]).squeeze(1), y[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        monitor.step(loss, batch=x[idx])
    with torch.no_grad():
        assert F.mse_loss(model(x[9000:]).squeeze(1), y[9000:]) < 0.12
