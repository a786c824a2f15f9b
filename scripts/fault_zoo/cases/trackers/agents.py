"""Agents: balancing poles with old samples, remembering them, and pushing a cart."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.forums.worlds import CartPoles
from scripts.fault_zoo.cases.mailing.material import mean_of_last
from scripts.fault_zoo.protocol import Attach, case

# ------------------------------------------------------------------------------------------ a policy that runs away


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
        self.critic = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        return self.actor(state), self.critic(state).squeeze(-1)


def train_proximal(attach: Attach, *, clip: float, epochs: int, rate: float) -> float:
    """Return the mean length of the last 60 episodes. A rollout has 32 steps of 32 poles."""
    torch.manual_seed(71)
    world = CartPoles(32, seed=7)
    model = ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    monitor = attach(model, optimizer)
    steps = 0
    while steps < 400:
        states: list[Tensor] = []
        actions: list[Tensor] = []
        rewards: list[Tensor] = []
        ends: list[Tensor] = []
        with torch.no_grad():
            for _ in range(32):
                state = world.state.clone()
                action = torch.distributions.Categorical(logits=model(state)[0]).sample()
                reward, done = world.step(action)
                for column, value in zip((states, actions, rewards, ends), (state, action, reward, done), strict=True):
                    column.append(value)
            ahead = model(world.state)[1]
            returns = []
            for reward, done in zip(reversed(rewards), reversed(ends), strict=True):
                ahead = reward + 0.97 * ahead * (1 - done)
                returns.append(ahead)
            s, a, target = torch.cat(states), torch.cat(actions), torch.cat(returns[::-1])
            logits, value = model(s)
            old = F.log_softmax(logits, 1).gather(1, a[:, None]).squeeze(1)
            advantage = target - value
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        for _ in range(epochs):
            for i in torch.randperm(len(s)).split(256):
                logits, value = model(s[i])
                ratio = (F.log_softmax(logits, 1).gather(1, a[i, None]).squeeze(1) - old[i]).exp()
                gain = torch.minimum(ratio * advantage[i], ratio.clamp(1 - clip, 1 + clip) * advantage[i])
                loss = -gain.mean() + 0.01 * F.mse_loss(value, target[i])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                monitor.step(loss, batch=s[i])
                steps += 1
    return mean_of_last(world.lengths, 60)


@case(
    fault="policy-divergence",
    also=("learning-rate-too-high", "exploding-gradient", "gradient-spike"),
    tolerate=("saturated-activation", "oscillating-gradient", "loss-plateau", "layer-imbalance", "vanishing-gradient"),
    onset=5,
    source="https://github.com/hill-a/stable-baselines/issues/213",
    tags=("rl", "ppo"),
)
def rollout_used_for_too_long(attach: Attach) -> None:
    """Each rollout is used for 20 epochs with a rate of 0.01, the ratio is clipped at 2 instead of 0.2, and nothing
    stops the epochs when the policy has moved away from the one that acted: it gets sure of itself and never recovers.
    Reported in https://github.com/hill-a/stable-baselines/issues/213,
    https://github.com/DLR-RM/stable-baselines3/issues/324 and https://github.com/openai/baselines/issues/975.
    """
    train_proximal(attach, clip=2.0, epochs=20, rate=1e-2)


# ------------------------------------------------------------------------------------------ memories with their graphs


class Recurrent(nn.Module):
    """Estimate the value of both actions from positions alone, so that speeds must be remembered."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(2, 48)
        self.cell = nn.GRUCell(48, 48)
        self.value = nn.Linear(48, 2)

    def forward(self, seen: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.cell(torch.relu(self.entry(seen)), hidden)
        return self.value(hidden), hidden


def train_memories(attach: Attach, *, repaired: bool) -> bool:
    """Return whether what the replay holds has a graph."""
    torch.manual_seed(72)
    world = CartPoles(16, seed=8)
    model = Recurrent()
    late = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor = attach(model, optimizer)
    replay: list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]] = []
    hidden = torch.zeros(16, 48)
    for step in range(300):
        seen = world.state[:, [0, 2]].clone()
        values, after = model(seen, hidden)
        chance = max(0.05, 1 - step / 150)
        action = torch.where(torch.rand(16) < chance, torch.randint(0, 2, (16,)), values.argmax(1))
        reward, done = world.step(action)
        after = after * (1 - done[:, None])
        if repaired:
            after = after.detach()
        replay.append((seen, hidden, action, reward, world.state[:, [0, 2]].clone(), after, done))
        hidden = after
        picked = torch.randint(0, len(replay), (4,)).tolist()
        s, h, a, r, s2, h2, end = (torch.cat(column) for column in zip(*(replay[j] for j in picked), strict=True))
        with torch.no_grad():
            ahead = late(s2, h2)[0].max(1).values * (1 - end)
        found = model(s, h.detach())[0].gather(1, a[:, None]).squeeze(1)
        loss = F.smooth_l1_loss(found, r + 0.95 * ahead)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=s)
        with torch.no_grad():
            for old, new in zip(late.parameters(), model.parameters(), strict=True):
                old.lerp_(new, 0.05)
    return any(entry[5].requires_grad for entry in replay)


@case(
    fault="graph-leak",
    also=("memory-growth",),
    onset=3,
    source="https://github.com/Metta-AI/metta/pull/1139",
    tags=("rl", "memory"),
)
def memories_with_their_graphs(attach: Attach) -> None:
    """The state of the GRU is stored in the replay with its graph, which goes back to the first step. It is detached
    when it is used, so that nothing fails and all graphs stay in memory. Reported in
    https://github.com/Metta-AI/metta/pull/1139, https://github.com/oxwhirl/pymarl/pull/73,
    https://github.com/recursionpharma/gflownet/pull/130 and https://github.com/Kaixhin/Rainbow/pull/33.
    """
    train_memories(attach, repaired=False)


@case(source="the repaired twin of `memories_with_their_graphs`: detached when stored", tags=("rl", "memory", "twin"))
def memories_without_graphs(attach: Attach) -> None:
    """The state is detached before it is stored."""
    assert not train_memories(attach, repaired=True)


# ------------------------------------------------------------------------------------------------------ an odd recipe


@case(
    source="Fujimoto et al. 2018, TD3, alg. 1: the actor is updated in every second step",
    tags=("rl", "td3", "odd"),
)
def actor_in_every_second_step(attach: Attach) -> None:
    """A cart is pushed to the middle of a rail. Two critics learn in every step and the actor in every second one, by
    an optimizer of its own; its gradient is missing in between.
    """
    torch.manual_seed(73)
    generator = torch.Generator().manual_seed(0)
    model = nn.ModuleDict(
        {
            "actor": nn.Sequential(nn.Linear(2, 48), nn.ReLU(), nn.Linear(48, 1), nn.Tanh()),
            "critic1": nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 1)),
            "critic2": nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 1)),
        }
    )
    late = copy.deepcopy(model)
    acts = torch.optim.Adam(model["actor"].parameters(), lr=1e-3)
    judges = torch.optim.Adam([*model["critic1"].parameters(), *model["critic2"].parameters()], lr=2e-3)
    monitor = attach(model, [acts, judges])

    def move(state: Tensor, push: Tensor) -> tuple[Tensor, Tensor]:
        speed = (state[:, 1:] + 0.3 * push).clamp(-1, 1)
        place = (state[:, :1] + 0.2 * speed).clamp(-1, 1)
        return torch.cat([place, speed], 1), -(place**2) - 0.1 * push**2

    def draw(count: int) -> Tensor:
        return 2 * torch.rand(count, 2, generator=generator) - 1

    for step in range(400):
        state = draw(128)
        with torch.no_grad():
            push = (model["actor"](state) + 0.5 * torch.randn(128, 1, generator=generator)).clamp(-1, 1)
            after, reward = move(state, push)
            noise = (0.2 * torch.randn(128, 1, generator=generator)).clamp(-0.5, 0.5)
            ahead = torch.cat([after, (late["actor"](after) + noise).clamp(-1, 1)], 1)
            target = reward + 0.9 * torch.minimum(late["critic1"](ahead), late["critic2"](ahead))
        pair = torch.cat([state, push], 1)
        loss = F.mse_loss(model["critic1"](pair), target) + F.mse_loss(model["critic2"](pair), target)
        judges.zero_grad()
        loss.backward()
        judges.step()
        acts.zero_grad()
        if step % 2:
            (-model["critic1"](torch.cat([state, model["actor"](state)], 1)).mean()).backward()
            acts.step()
            with torch.no_grad():
                for old, new in zip(late.parameters(), model.parameters(), strict=True):
                    old.lerp_(new, 0.02)
        monitor.step(loss, batch=state)
    state, gained = draw(500), 0.0
    for _ in range(15):
        with torch.no_grad():
            state, reward = move(state, model["actor"](state))
        gained += reward.mean().item()
    assert state[:, 0].abs().mean() < 0.2, gained
