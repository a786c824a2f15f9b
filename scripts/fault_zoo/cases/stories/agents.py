"""Agents: values with the loss of a classifier, commands that a simulator overrides, and a copy that is not trained."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.protocol import Attach, case

# ------------------------------------------------------------------------------------ values as classes


class CatchGame:
    """A paddle at the bottom of a field of 5 columns catches or evades particles that fall, 32 games at a time."""

    rewards = torch.tensor([-4.0, -1.0, 1.0, 4.0])

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.paddle = torch.full((32,), 2)
        self.column, self.height, self.kind = torch.zeros(3, 32, dtype=torch.int64)
        self.drop(torch.ones(32, dtype=torch.bool))

    def drop(self, is_new: Tensor) -> None:
        """Start a new particle where the last one has arrived."""
        column, kind = (torch.randint(0, n, (32,), generator=self.generator) for n in (5, 4))
        self.column = torch.where(is_new, column, self.column)
        self.kind = torch.where(is_new, kind, self.kind)
        self.height = torch.where(is_new, 4, self.height)

    def state(self) -> Tensor:
        """Return the paddle, the particle and what it is worth, (32, 4)."""
        worth = self.rewards[self.kind] / 4
        return torch.stack([self.paddle / 2 - 1, self.column / 2 - 1, self.height / 4, worth], 1)

    def step(self, move: Tensor) -> Tensor:
        """Move left, right or not, and return the rewards."""
        self.paddle = (self.paddle + torch.tensor([-1, 1, 0])[move]).clamp(0, 4)
        self.height = self.height - 1
        arrived = self.height == 0
        reward = torch.where(arrived & (self.paddle == self.column), self.rewards[self.kind], 0.0)
        self.drop(arrived)
        return reward


def train_catcher(attach: Attach, *, as_classes: bool) -> float:
    """Return the mean reward of a step without exploration."""
    torch.manual_seed(541)
    game = CatchGame(torch.Generator().manual_seed(1))
    model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    criterion = nn.CrossEntropyLoss() if as_classes else nn.MSELoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    memory: list[tuple[Tensor, ...]] = []
    explore = 0.5
    for _ in range(500):
        state = game.state()
        with torch.no_grad():
            move = model(state).argmax(1)
        move = torch.where(torch.rand(32) < explore, torch.randint(0, 3, (32,)), move)
        reward = game.step(move)
        memory.append((state, move, reward, game.state()))
        explore *= 0.996
        picked = torch.randint(0, len(memory), (4,)).tolist()
        state, move, reward, following = (torch.cat([memory[k][part] for k in picked]) for part in range(4))
        with torch.no_grad():
            target = model(state)
            target[torch.arange(128), move] = reward + 0.8 * model(following).max(1).values
        loss = criterion(model(state), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=state)
    total = 0.0
    for _ in range(200):
        with torch.no_grad():
            total += game.step(model(game.state()).argmax(1)).mean().item() / 200
    return total


@case(
    fault="exploding-gradient",
    also=("loss-plateau", "learning-rate-too-high", "unstable-formula", "non-finite"),
    tolerate=("layer-imbalance", "gradient-spike", "dead-relu"),
    onset=0,
    source="https://ai.stackexchange.com/questions/13793/deep-q-learning-algorithm-for-simple-python-game-makes-player-stuck",
    tags=("dqn", "loss"),
)
def values_learned_as_classes(attach: Attach) -> None:
    """The values of moves are learned with the loss of a classifier, for which they are not probabilities. The loss and
    the values have no bound: the loss falls below -1e11, and the paddle stays at one side. A step yields 0.00 on
    average. No kind fits; gradients that grow with the values come nearest.
    """
    train_catcher(attach, as_classes=True)


@case(source="the repaired twin of `values_learned_as_classes`", tags=("dqn", "loss", "twin"))
def values_learned_by_regression(attach: Attach) -> None:
    """The loss is the squared error; a step yields 0.30."""
    assert train_catcher(attach, as_classes=False) > 0.2


# ------------------------------------------------------------------------------------ commands that are overridden


class Road:
    """Cars that follow others. The reward is for a gap near 20 m and for calm pedals."""

    def __init__(self, *, count: int, overrides: float, generator: torch.Generator) -> None:
        self.overrides, self.generator, self.count = overrides, generator, count
        self.speed, self.lead = (8 + 2 * torch.randn(2, count, generator=generator)).unbind()
        self.gap = 20 + 8 * torch.randn(count, generator=generator)

    def state(self) -> Tensor:
        return torch.stack([self.speed / 10 - 1, self.lead / 10 - 1, self.gap / 20 - 1], 1)

    def step(self, command: Tensor) -> Tensor:
        """Accelerate as commanded, or as the model of the simulator wants, and return the rewards."""
        own = 0.1 * (self.gap - 12) + 0.5 * (self.lead - self.speed)
        is_overridden = torch.rand(self.count, generator=self.generator) < self.overrides
        acceleration = torch.where(is_overridden, own, command).clamp(-3, 3)
        self.speed = (self.speed + 0.5 * acceleration).clamp(0, 20)
        self.lead = (self.lead + 0.3 * torch.randn(self.count, generator=self.generator)).clamp(4, 12)
        self.gap = (self.gap + 0.5 * (self.lead - self.speed)).clamp(0, 60)
        return -((self.gap - 20).abs() / 10).clamp(max=3) - 0.02 * command**2


class Driver(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
        self.critic = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
        self.log_std = nn.Parameter(torch.zeros(1))

    def act(self, state: Tensor) -> torch.distributions.Normal:
        return torch.distributions.Normal(3 * self.actor(state).squeeze(1), self.log_std.clamp(-2, 0.5).exp())


def advantages(reward: Tensor, value: Tensor, last: Tensor) -> Tensor:
    """Return generalized advantages (T, N) of rewards and values (T, N)."""
    result, running = torch.zeros_like(reward), torch.zeros_like(last)
    following = last
    for t in range(len(reward) - 1, -1, -1):
        running = reward[t] + 0.95 * following - value[t] + 0.95 * 0.9 * running
        result[t], following = running, value[t]
    return result


@case(
    fault="loss-plateau",
    tolerate=("learning-rate-too-low", "policy-divergence"),
    onset=0,
    source="https://7174andy.github.io/sumo-rl-mixed-traffic/latest",
    tags=("ppo", "simulator"),
)
def commands_that_the_simulator_overrides(attach: Attach) -> None:
    """A policy accelerates a car behind another one. The simulator overrides 99 % of its commands with those of its own
    model, so that rewards say nothing about commands. With all commands carried out, the mean reward is -2.0 after this
    training, and -0.13 after a training without overrides. No kind fits; a policy that does not learn comes nearest.
    """
    torch.manual_seed(542)
    generator = torch.Generator().manual_seed(2)
    road = Road(count=32, overrides=0.99, generator=generator)
    model = Driver()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor = attach(model, optimizer)
    for _ in range(30):
        seen = []
        with torch.no_grad():
            for _ in range(32):
                state = road.state()
                command = model.act(state).sample()
                log_prob = model.act(state).log_prob(command)
                seen.append((state, command, log_prob, road.step(command), model.critic(state).squeeze(1)))
            states, commands, log_probs, rewards, values = (torch.stack(column) for column in zip(*seen, strict=True))
            gain = advantages(rewards, values, model.critic(road.state()).squeeze(1))
        returns = gain + values
        gain = (gain - gain.mean()) / gain.std()
        for i in torch.randperm(1024).view(8, 128).repeat(2, 1):
            policy = model.act(states.flatten(0, 1)[i])
            ratio = (policy.log_prob(commands.flatten()[i]) - log_probs.flatten()[i]).exp()
            better = torch.min(ratio * gain.flatten()[i], ratio.clamp(0.8, 1.2) * gain.flatten()[i])
            error = F.mse_loss(model.critic(states.flatten(0, 1)[i]).squeeze(1), returns.flatten()[i])
            loss = -better.mean() + 0.5 * error - 0.001 * policy.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            monitor.step(loss)


# ------------------------------------------------------------------------------------ a copy that is not trained


class Learner(nn.Module):
    """The policy and the value function of the inner algorithm."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
        self.value_function = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 1))
        self.policy_optimizer = torch.optim.Adam(self.policy.parameters(), lr=3e-3)
        self.value_optimizer = torch.optim.Adam(self.value_function.parameters(), lr=1e-2)


class MetaLearner(nn.Module):
    """Model-agnostic meta-learning around an inner algorithm."""

    def __init__(self, inner: Learner) -> None:
        super().__init__()
        self.inner = inner
        self.value_function = copy.deepcopy(inner.value_function)

    def walk(self, weights: Mapping[str, Tensor], goal: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the states (T, N, 3), log probabilities and returns (T, N) of 16 walks of 8 steps towards a goal."""
        place = torch.zeros(len(goal), 2)
        states, log_probs, rewards = [], [], []
        for t in range(8):
            states.append(torch.cat([place, torch.full((len(place), 1), t / 8)], 1))
            move = torch.distributions.Normal(torch.func.functional_call(self.inner.policy, weights, (place,)), 0.3)
            step = move.sample()
            log_probs.append(move.log_prob(step).sum(1))
            place = place + 0.4 * step.clamp(-1, 1)
            rewards.append(-(place - goal).norm(dim=1))
        returns = torch.stack(rewards).flip(0).cumsum(0).flip(0)
        return torch.stack(states), torch.stack(log_probs), returns

    def loss(self, walks: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        states, log_probs, returns = walks
        with torch.no_grad():
            gain = returns - self.value_function(states).squeeze(2)
        return -(log_probs * gain).mean()

    def train_value_function(self, walks: tuple[Tensor, Tensor, Tensor]) -> None:
        """Fit the value function to the returns of walks."""
        states, _, returns = walks
        error = F.mse_loss(self.value_function(states).squeeze(2), returns)
        self.inner.value_optimizer.zero_grad()
        error.backward()
        self.inner.value_optimizer.step()


@case(
    fault="not-optimized",
    also=("no-gradient", "missing-zero-grad"),
    layers=("value_function", "inner.value_function"),
    tolerate=("exploding-gradient",),
    onset=0,
    source="https://github.com/rlworkgroup/garage/issues/2301",
    tags=("maml", "optimizer"),
)
def copy_of_the_value_function(attach: Attach) -> None:
    """A meta-learner copies the value function of its inner algorithm. It computes the gradient for the copy, and the
    optimizer has the parameters of the original. Neither learns: the squared error stays at 30, and adapted policies
    score -10.5. If the original is used, the error is 3.6 and the score -5.4.
    """
    torch.manual_seed(543)
    model = MetaLearner(Learner())
    optimizer = model.inner.policy_optimizer
    monitor = attach(model, [optimizer, model.inner.value_optimizer])
    weights = dict(model.inner.policy.named_parameters())
    for _ in range(120):
        losses = []
        for angle in 6.283 * torch.rand(4):
            goal = torch.stack([angle.cos(), angle.sin()]).expand(16, 2)
            walks = model.walk(weights, goal)
            grads = torch.autograd.grad(model.loss(walks), list(weights.values()), create_graph=True)
            adapted = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), grads, strict=True)}
            model.train_value_function(walks)
            losses.append(model.loss(model.walk(adapted, goal)))
        loss = torch.stack(losses).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss)
