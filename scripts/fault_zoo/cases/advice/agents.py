"""Agents: one that runs into the wall, and one whose actions are cut before they are scored."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Normal

from scripts.fault_zoo.protocol import Attach, case

# ------------------------------------------------------------------------------------ into the wall

MOVES = torch.tensor([[0, 0], [0, 1], [0, -1], [1, 0], [-1, 0], [1, 1], [1, -1], [-1, 1], [-1, -1]])


def wander(policy: nn.Module, generator: torch.Generator, *, steps: int = 20) -> tuple[Tensor, Tensor, Tensor]:
    """Let 16 robots seek targets on a board of 25 x 25. Return log-probabilities and rewards, (T, 16), and the boards.

    A step towards the target earns 1, a step away from it costs 1, and a step off the board costs 0.5.
    """
    place, target = torch.randint(0, 25, (2, 16, 2), generator=generator)
    scores, rewards, seen = [], [], []
    for _ in range(steps):
        board = torch.cat([place, target], 1) / 12 - 1
        chosen = Categorical(logits=policy(board))
        move = chosen.sample()
        after = place + MOVES[move]
        is_off = ((after < 0) | (after > 24)).any(1)
        after = torch.where(is_off[:, None], place, after)
        nearer = (place - target).abs().amax(1) - (after - target).abs().amax(1)
        scores.append(chosen.log_prob(move))
        rewards.append(nearer.sign() - 0.5 * is_off.float())
        seen.append(board)
        place = after
    return torch.stack(scores), torch.stack(rewards), torch.stack(seen)


@case(
    fault="learning-rate-too-high",
    also=("policy-divergence", "loss-plateau", "saturated-activation", "vanishing-gradient", "dead-relu"),
    tolerate=("gradient-spike", "rising-sparsity", "dead-layer", "no-gradient"),
    onset=0,
    source="https://discuss.pytorch.org/t/help-with-pytorch-policy-gradient-agent-that-learns-actions-resulting-in-"
    "consistent-negative-rewards/160728",
    tags=("rl", "policy-gradient", "rate"),
)
def robots_into_the_wall(attach: Attach) -> None:
    """Robots learn by policy gradients to seek a target, at a rate of 0.05 with Adam. After a few updates they are
    certain of one move, whatever they see, run into a wall and learn nothing from it. At 0.003, they come near the
    target.
    """
    torch.manual_seed(651)
    generator = torch.Generator().manual_seed(1)
    policy = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 9))
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.05)
    monitor = attach(policy, optimizer)
    for _ in range(300):
        scores, rewards, seen = wander(policy, generator)
        gains = rewards.flip(0).cumsum(0).flip(0)
        gains = (gains - gains.mean()) / (gains.std() + 1e-6)
        loss = -(scores * gains).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=seen)


# ------------------------------------------------------------------------------------ actions that are cut


class Pilot(nn.Module):
    """An actor and a critic that see where they are, how fast, and where to go."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 2))
        self.log_scale = nn.Parameter(torch.zeros(2))
        self.critic = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 1))

    def policy(self, seen: Tensor) -> Normal:
        return Normal(self.actor(seen), self.log_scale.exp())


def fly(pilot: Pilot, generator: torch.Generator, *, stores_cut: bool) -> tuple[Tensor, ...]:
    """Fly 32 craft for 20 steps. Return what is seen, actions, their log-probabilities, and gains, flattened."""
    place, speed = torch.rand(32, 2, generator=generator) * 2 - 1, torch.zeros(32, 2)
    goal = torch.rand(32, 2, generator=generator) * 2 - 1
    seen, actions, scores, rewards = [], [], [], []
    with torch.no_grad():
        for _ in range(20):
            view = torch.cat([place, speed, goal], 1)
            policy = pilot.policy(view)
            action = policy.sample()
            pushed = action.clamp(-0.5, 0.5)
            speed = 0.7 * speed + 0.4 * pushed
            place = place + speed
            seen.append(view)
            actions.append(pushed if stores_cut else action)
            scores.append(policy.log_prob(action).sum(1))
            rewards.append(-(place - goal).abs().sum(1))
        views = torch.stack(seen)
        values = pilot.critic(views).squeeze(2)
    gains, total = [], torch.zeros(32)
    for reward in reversed(rewards):
        total = reward + 0.8 * total
        gains.append(total)
    returns = torch.stack(gains[::-1])
    parts = (views, torch.stack(actions), torch.stack(scores), returns, returns - values)
    return (*(part.flatten(0, 1) for part in parts), torch.stack(rewards).mean())


def train_pilot(attach: Attach, *, stores_cut: bool) -> float:
    """Return the mean reward of the last flights."""
    torch.manual_seed(652)
    generator = torch.Generator().manual_seed(2)
    pilot = Pilot()
    optimizer = torch.optim.Adam(pilot.parameters(), lr=2e-3)
    monitor = attach(pilot, optimizer)
    rewards = []
    for _ in range(40):
        seen, actions, scores, returns, gains, reward = fly(pilot, generator, stores_cut=stores_cut)
        gains = (gains - gains.mean()) / gains.std()
        rewards.append(reward.item())
        for _ in range(2):
            for i in torch.randperm(len(seen), generator=generator).split(160):
                ratio = (pilot.policy(seen[i]).log_prob(actions[i]).sum(1) - scores[i]).exp()
                surrogate = torch.minimum(ratio * gains[i], ratio.clamp(0.8, 1.2) * gains[i])
                error = (pilot.critic(seen[i]).squeeze(1) - returns[i]).square().mean()
                loss = -surrogate.mean() + 0.1 * error
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                monitor.step(loss, batch=seen[i])
    return sum(rewards[-5:]) / 5


@case(
    fault="policy-divergence",
    also=("loss-plateau",),
    tolerate=("gradient-spike", "learning-rate-too-high"),
    onset=0,
    source="https://github.com/ray-project/ray/issues/8889",
    tags=("rl", "ppo", "data"),
)
def actions_cut_before_they_are_stored(attach: Attach) -> None:
    """PPO learns to fly to a goal. An action is cut to what the craft can do and then stored, with the log-
    probability of the action before the cut. The ratio of two policies that are the same is far from 1, and the mean
    reward ends at -1.15.
    """
    train_pilot(attach, stores_cut=True)


@case(source="the repaired twin of `actions_cut_before_they_are_stored`", tags=("rl", "ppo", "data", "twin"))
def actions_cut_for_the_craft_alone(attach: Attach) -> None:
    """The action is stored as it was drawn, and the mean reward of the last flights is above -0.5."""
    assert train_pilot(attach, stores_cut=False) > -0.5
