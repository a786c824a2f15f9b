"""Agents: one that wanders for too long, one whose gains are all zero, and one whose world is never the same."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.forums.worlds import CartPoles
from scripts.fault_zoo.protocol import Attach, case

# ------------------------------------------------------------------------------------ wandering for too long


def train_dqn(attach: Attach, *, eps_decay: float) -> float:
    """Return the mean length of the last 30 episodes of training."""
    torch.manual_seed(261)
    world = CartPoles(4, seed=1)
    net = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    target = copy.deepcopy(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    monitor = attach(net, optimizer, loss_fn=F.smooth_l1_loss)
    memory: list[tuple[Tensor, ...]] = []
    for step in range(1500):
        state = world.state.clone()
        with torch.no_grad():
            best = net(state).argmax(1)
        eps = 0.05 + 0.85 * math.exp(-step / eps_decay)
        action = torch.where(torch.rand(4) < eps, torch.randint(0, 2, (4,)), best)
        reward, done = world.step(action)
        memory.append((state, action, reward, done, world.state.clone()))
        if step < 50:
            continue
        picked = torch.randint(0, len(memory), (16,)).tolist()
        s, a, r, end, after = (torch.cat(part) for part in zip(*(memory[k] for k in picked), strict=True))
        with torch.no_grad():
            wanted = r + 0.97 * target(after).max(1).values * (1 - end)
        loss = F.smooth_l1_loss(net(s).gather(1, a[:, None]).squeeze(1), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=s)
        if step % 50 == 0:
            target.load_state_dict(net.state_dict())
    return sum(world.lengths[-30:]) / 30


@case(
    fault="loss-plateau",
    onset=0,
    source="https://github.com/MehranTaghian/DQN-Trading/issues/9",
    tags=("rl", "dqn", "exploration"),
)
def wanders_for_too_long(attach: Attach) -> None:
    """The chance of a random move decays ten times too slowly: it is 0.68 after the last step. The last episodes are 46
    steps long, and 91 in the twin. The network itself learns. No kind fits; the nearest is a training that stands
    still.
    """
    train_dqn(attach, eps_decay=5000)


@case(source="the repaired twin of `wanders_for_too_long`", tags=("rl", "dqn", "exploration", "twin"))
def wanders_no_longer_than_needed(attach: Attach) -> None:
    """The chance of a random move is 0.09 after the last step."""
    assert train_dqn(attach, eps_decay=500) > 75


# ------------------------------------------------------------------------------------ gains that are all zero


def normalize_advantages(advantages: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Return the advantages (episodes, steps) with a mean of 0 and a variance of 1 over some axes."""
    mean = advantages.mean(axes, keepdim=True)
    variance = advantages.var(axes, keepdim=True, unbiased=False)
    return (advantages - mean) / (variance + 1e-8).sqrt()


def train_ppo(attach: Attach, *, axes: tuple[int, ...]) -> float:
    """Return the mean length of the last 30 episodes."""
    torch.manual_seed(262)
    world = CartPoles(1, seed=2)
    actor = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
    critic = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
    model = nn.ModuleDict({"actor": actor, "critic": critic})
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    monitor = attach(model, optimizer)
    for _ in range(100):
        states, actions, over = [], [], False
        while not over:
            states.append(world.state.clone())
            with torch.no_grad():
                actions.append(torch.distributions.Categorical(logits=actor(states[-1])).sample())
            over = bool(world.step(actions[-1])[1])
        seen, chosen = torch.cat(states), torch.cat(actions)
        returns = torch.zeros(len(seen))
        ahead = 0.0
        for time in reversed(range(len(seen))):
            ahead = 1.0 + 0.97 * ahead
            returns[time] = ahead
        returns = returns / 20
        with torch.no_grad():
            before = torch.distributions.Categorical(logits=actor(seen)).log_prob(chosen)
            gains = normalize_advantages((returns - critic(seen).squeeze(1))[None], axes)[0]
        for _ in range(4):
            ratio = (torch.distributions.Categorical(logits=actor(seen)).log_prob(chosen) - before).exp()
            policy_loss = -torch.min(ratio * gains, ratio.clamp(0.8, 1.2) * gains).mean()
            loss = policy_loss + 0.5 * F.mse_loss(critic(seen).squeeze(1), returns)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            monitor.step(loss, batch=seen)
    return sum(world.lengths[-30:]) / 30


@case(
    fault="no-gradient",
    also=("dead-layer", "vanishing-gradient"),
    layers=("actor",),
    onset=0,
    source="https://github.com/tensorflow/agents/issues/651",
    tags=("rl", "ppo"),
)
def gains_of_one_episode(attach: Attach) -> None:
    """Advantages are normalized over the episodes of the batch, of which there is one: all of them are 0, and so is the
    gradient of the actor. Episodes stay at 22 steps while the critic learns.
    """
    train_ppo(attach, axes=(0,))


@case(source="the repaired twin of `gains_of_one_episode`", tags=("rl", "ppo", "twin"))
def gains_of_all_steps(attach: Attach) -> None:
    """Advantages are normalized over episodes and steps."""
    assert train_ppo(attach, axes=(0, 1)) > 100


# ------------------------------------------------------------------------------------ a world that is never the same


class Vehicles:
    """Six cars on a ring road of 600 m. One of them sends on one of three bands, which the others use as well.

    Speeds change at random, and a car that leaves at one end comes back at the other.
    """

    def __init__(self) -> None:
        self.place = 600 * torch.rand(6)
        self.speed = 10 + 20 * torch.rand(6)
        self.band = torch.randint(0, 3, (6,))

    def observe(self) -> Tensor:
        """Return how much each band is disturbed, and the distances of the other cars, (8,)."""
        gap = (self.place[1:] - self.place[0]).abs()
        gap = torch.minimum(gap, 600 - gap) / 100
        noise = torch.zeros(3).index_add(0, self.band[1:], (-gap).exp())
        return torch.cat([noise, gap])

    def step(self, band: int) -> float:
        """Send on a band, move on, and return the rate of the link."""
        noise = float(self.observe()[band])
        fading = float(torch.distributions.Exponential(1.0).sample())
        self.speed = (self.speed + 2 * torch.randn(6)).clamp(5, 35)
        self.place = (self.place + self.speed) % 600
        self.band = torch.where(torch.rand(6) < 0.1, torch.randint(0, 3, (6,)), self.band)
        return math.log2(1 + fading / (0.05 + noise))


@case(source="https://github.com/le-liang/MARLspectrumSharingV2X/issues/23", tags=("rl", "dqn", "odd"))
def rewards_among_moving_cars(attach: Attach) -> None:
    """A car learns on which band to send. The reward of an episode goes up and down from the first to the last. The
    answer was that this comes from a world that changes: cars move, leave at one end and come back at the other.
    """
    torch.manual_seed(263)
    net = nn.Sequential(nn.Linear(8, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 3))
    optimizer = torch.optim.RMSprop(net.parameters(), lr=1e-3)
    monitor = attach(net, optimizer, loss_fn=F.mse_loss)
    states, bands, rewards = [], [], []

    def episode(eps: float) -> float:
        world, total = Vehicles(), 0.0
        for _ in range(10):
            state = world.observe()
            with torch.no_grad():
                best = int(net(state).argmax())
            band = int(torch.randint(0, 3, (1,))) if torch.rand(1).item() < eps else best
            reward = world.step(band)
            total += reward
            states.append(state)
            bands.append(band)
            rewards.append(reward)
        return total / 10

    before = sum(episode(1.0) for _ in range(40)) / 40
    for step in range(400):
        episode(max(0.05, 1 - step / 250))
        picked = torch.randint(0, len(states), (64,)).tolist()
        s, a = torch.stack([states[k] for k in picked]), torch.tensor([bands[k] for k in picked])
        loss = F.mse_loss(net(s).gather(1, a[:, None]).squeeze(1), torch.tensor([rewards[k] for k in picked]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=s)
    after = sum(episode(0.0) for _ in range(100)) / 100
    assert after > before + 0.5, (before, after)
