"""Physics, graphs, reinforcement learning, recommenders, implicit fields, meta-learning. All of these runs are fine."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from scripts.fault_zoo.cases.healthy_data import cartpole_step
from scripts.fault_zoo.protocol import Attach, case


@case(source="PINN, Raissi et al. 2019: a Poisson problem in one dimension", tags=("pinn", "double-backward", "tanh"))
def pinn_poisson(attach: Attach) -> None:
    """The loss holds second derivatives of the network (double backward); fresh collocation points at every step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 600, eta_min=1e-5)
    monitor = attach(model, optimizer)
    edge = torch.tensor([[-1.0], [1.0]])
    for _ in range(600):
        t = (torch.rand(192, 1) * 2 - 1).requires_grad_(True)
        u = model(t)
        (du,) = torch.autograd.grad(u.sum(), t, create_graph=True)
        (ddu,) = torch.autograd.grad(du.sum(), t, create_graph=True)
        loss = (ddu + math.pi**2 * torch.sin(math.pi * t)).pow(2).mean() + 20 * model(edge).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        monitor.step(loss, batch=t)
    with torch.no_grad():
        t = torch.linspace(-1, 1, 200)[:, None]
        assert (model(t) - torch.sin(math.pi * t)).abs().max() < 0.1


@case(
    source="REINFORCE with normalised returns, Williams 1992; cart-pole",
    tags=("rl", "policy-gradient", "noisy"),
    tolerate=("loss-plateau",),
)
def reinforce_cartpole(attach: Attach) -> None:
    """Policy gradient: the surrogate loss hovers around zero and says nothing; the episodes get longer. Gradients are
    noisy by nature.
    """
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    monitor = attach(model, optimizer)
    lengths = []
    for _ in range(80):
        state, alive = 0.05 * (torch.rand(24, 4) * 2 - 1), torch.ones(24, dtype=torch.bool)
        states: Any = []
        actions: Any = []
        masks: Any = []
        for _ in range(120):
            with torch.no_grad():
                action = torch.distributions.Categorical(logits=model(state)).sample()
            states.append(state)
            actions.append(action)
            masks.append(alive)
            state, fell = cartpole_step(state, action)
            alive = alive & ~fell
            if not alive.any():
                break
        states, actions, masks = torch.stack(states), torch.stack(actions), torch.stack(masks).float()
        lengths.append(masks.sum(0).mean().item())
        returns = torch.zeros_like(masks)
        running = torch.zeros(24)
        for t in reversed(range(len(masks))):
            running = masks[t] * (1 + 0.98 * running)
            returns[t] = running
        valid = masks > 0
        advantage = (returns - returns[valid].mean()) / (returns[valid].std() + 1e-6)
        log_p = torch.distributions.Categorical(logits=model(states)).log_prob(actions)
        loss = -(log_p * advantage * masks).sum() / masks.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss)
    assert sum(lengths[-5:]) / 5 > 3 * sum(lengths[:3]) / 3, lengths


@case(source="neural ODE by fixed-step RK4, Chen et al. 2018", tags=("ode", "unrolled"))
def neural_ode_spiral(attach: Attach) -> None:
    """Backpropagation through 30 Runge-Kutta steps; the gradient is dominated by the long trajectories."""
    torch.manual_seed(7)
    matrix = torch.tensor([[-0.1, 2.0], [-2.0, -0.1]])
    field = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 2))
    dt, steps = 0.05, 30

    def rk4(f: Callable[..., Any], y: Tensor) -> Tensor:
        out = [y]
        for _ in range(steps):
            k1 = f(y)
            k2 = f(y + dt / 2 * k1)
            k3 = f(y + dt / 2 * k2)
            k4 = f(y + dt * k3)
            y = y + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
            out.append(y)
        return torch.stack(out)

    optimizer = torch.optim.Adam(field.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 250)
    monitor = attach(field, optimizer)
    for _ in range(250):
        start = torch.randn(48, 2)
        with torch.no_grad():
            truth = rk4(lambda y: (y**3) @ matrix.T, start.clamp(-1.5, 1.5))
        loss = F.l1_loss(rk4(lambda y: field(y**3), truth[0]), truth)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(field.parameters(), 5.0)
        optimizer.step()
        schedule.step()
        monitor.step(loss, batch=start)
    assert loss.item() < 0.15, loss.item()


class DeepSet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.phi = nn.Sequential(nn.Embedding(10, 32), nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 64))
        self.rho = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        return self.rho((self.phi(tokens) * mask[..., None]).sum(1)).squeeze(1)


@case(
    source="Deep Sets, Zaheer et al. 2017: sum of digits, growing set size", tags=("sets", "curriculum", "loss-jumps")
)
def deep_sets_curriculum(attach: Attach) -> None:
    """The sets grow from 6 to 24 elements in four stages: at each stage the loss jumps several times and comes down
    again.
    """
    torch.manual_seed(10)
    model = DeepSet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    monitor = attach(model, optimizer)
    for step in range(480):
        limit = (6, 10, 16, 24)[step // 120]
        tokens = torch.randint(0, 10, (192, limit))
        mask = (torch.arange(limit)[None] < torch.randint(1, limit + 1, (192, 1))).float()
        goal = (tokens * mask).sum(1) / 10 + 0.3 * torch.randn(192)  # measured with some noise
        loss = F.smooth_l1_loss(model(tokens, mask), goal)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        monitor.step(loss, batch=tokens)
    assert loss.item() < 0.1, loss.item()
