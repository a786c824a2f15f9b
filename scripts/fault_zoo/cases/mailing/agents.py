"""Agents that balance a pole, and a learner that learns to learn."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.forums.worlds import CartPoles
from scripts.fault_zoo.cases.mailing.material import mean_of_last
from scripts.fault_zoo.protocol import Attach, case

# --------------------------------------------------------------------------------------------- a fall without an end


def train_poles(attach: Attach, *, repaired: bool) -> float:
    """Learn from a replay of all steps so far. Return the mean length of the last 40 episodes."""
    torch.manual_seed(801)
    world = CartPoles(32, seed=8)
    model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    late = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor = attach(model, optimizer)
    replay: list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]] = []
    for step in range(400):
        state = world.state.clone()
        with torch.no_grad():
            action = model(state).argmax(1)
        chance = max(0.05, 1 - step / 150)
        action = torch.where(torch.rand(32) < chance, torch.randint(0, 2, (32,)), action)
        reward, done = world.step(action)
        replay.append((state, action, reward, world.state.clone(), done))
        picked = torch.randint(0, len(replay), (8,)).tolist()
        s, a, r, s2, end = (torch.cat(column) for column in zip(*(replay[j] for j in picked), strict=True))
        with torch.no_grad():
            ahead = late(s2).max(1).values
            if repaired:
                ahead = ahead * (1 - end)
        loss = F.smooth_l1_loss(model(s).gather(1, a[:, None]).squeeze(1), r + 0.95 * ahead)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=s)
        with torch.no_grad():
            for old, new in zip(late.parameters(), model.parameters(), strict=True):
                old.lerp_(new, 0.05)
    return mean_of_last(world.lengths, 40)


@case(
    fault="loss-plateau",
    onset=0,
    source="https://github.com/navneet-nmk/pytorch-rl/issues/2",
    tags=("rl", "dqn"),
)
def falls_that_go_on(attach: Attach) -> None:
    """The target of a step that ends the episode goes on with the value of the next one's start. Falling costs nothing,
    all values become 1 / (1 - discount), and the agent learns nothing. Reported in
    https://github.com/navneet-nmk/pytorch-rl/issues/2; see also https://github.com/ghliu/pytorch-ddpg/issues/11. No
    kind says that a target is wrong; that no more than a constant is learned comes nearest.
    """
    train_poles(attach, repaired=False)


# ------------------------------------------------------------------------------------------------- learning to learn


@case(source="Nichol et al. 2018, Reptile", tags=("meta-learning", "odd"))
def weights_that_learn_to_learn(attach: Attach) -> None:
    """A copy of the network takes ten steps on five points of one sine, and the weights follow it a little; their
    gradient is written by the script, and the loss is that of a new sine each time.
    """
    torch.manual_seed(802)
    model = nn.Sequential(nn.Linear(1, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    monitor = attach(model, optimizer)
    losses = []
    for _ in range(300):
        change = [torch.zeros_like(p) for p in model.parameters()]
        total = torch.zeros(())
        for _ in range(3):
            size, phase = 0.5 + 2 * torch.rand(()), math.pi * torch.rand(())
            pupil = copy.deepcopy(model)
            inner = torch.optim.SGD(pupil.parameters(), lr=0.03)
            x = torch.rand(20, 1) * 10 - 5
            y = size * torch.sin(x + phase)
            for _ in range(10):
                inner.zero_grad()
                F.mse_loss(pupil(x[:10]), y[:10]).backward()
                inner.step()
            with torch.no_grad():
                total += F.mse_loss(pupil(x[10:]), y[10:]) / 3
                for sum_, old, new in zip(change, model.parameters(), pupil.parameters(), strict=True):
                    sum_ += (old - new) / 3
        for p, difference in zip(model.parameters(), change, strict=True):
            p.grad = difference
        optimizer.step()
        monitor.step(total)
        losses.append(total.item())
    assert mean_of_last(losses, 100) < 0.8 * sum(losses[:50]) / 50
