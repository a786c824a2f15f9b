"""Agents that learn from rewards: PPO, A2C, DQN and DDPG."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical

from scripts.fault_zoo.cases.faulty_data import setup
from scripts.fault_zoo.cases.forums.worlds import CartPoles, Islands, Ships
from scripts.fault_zoo.protocol import Attach, case


class ActorCritic(nn.Module):
    """A policy and a value on one body."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.policy = nn.Linear(width, 2)
        self.value = nn.Linear(width, 1)

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(states)
        return self.policy(h), self.value(h).squeeze(-1)


@dataclass
class Rollout:
    """Transitions of all environments in one row."""

    states: Tensor
    actions: Tensor
    log_probs: Tensor
    advantages: Tensor
    returns: Tensor


@torch.no_grad()
def collect(model: ActorCritic, env: CartPoles, steps: int, gamma: float = 0.99, lam: float = 0.95) -> Rollout:
    """Play and estimate the advantages (GAE)."""
    rows: list[tuple[Tensor, ...]] = []
    for _ in range(steps):
        state = env.state.clone()
        logits, value = model(state)
        policy = Categorical(logits=logits)
        action = policy.sample()
        reward, done = env.step(action)
        rows.append((state, action, policy.log_prob(action), value, reward, done))
    states, actions, log_probs, values, rewards, dones = (torch.stack(column) for column in zip(*rows, strict=True))
    following = torch.cat([values[1:], model(env.state)[1][None]])
    errors = rewards + gamma * following * (1 - dones) - values
    advantages, running = torch.zeros_like(errors), torch.zeros(errors.shape[1])
    for t in reversed(range(steps)):
        running = errors[t] + gamma * lam * (1 - dones[t]) * running
        advantages[t] = running
    returns = advantages + values
    return Rollout(
        states.flatten(0, 1), actions.flatten(), log_probs.flatten(), advantages.flatten(), returns.flatten()
    )


def clipped(ratio: Tensor, advantages: Tensor) -> Tensor:
    """Return PPO's loss of the policy."""
    return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()


def train_small_minibatch(attach: Attach, *, skip_single: bool) -> CartPoles:
    """Five environments times 77 steps are six minibatches of 64 and one of a single transition."""
    setup(1)
    env, model = CartPoles(5, seed=1), ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    monitor = attach(model, optimizer)
    for _ in range(25):
        data = collect(model, env, steps=77)
        for _ in range(4):
            for index in torch.randperm(len(data.actions)).split(64):
                advantages = data.advantages[index]
                if len(index) > 1 or not skip_single:
                    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
                logits, values = model(data.states[index])
                policy = Categorical(logits=logits, validate_args=False)
                ratio = (policy.log_prob(data.actions[index]) - data.log_probs[index]).exp()
                value_loss = F.smooth_l1_loss(values, data.returns[index])
                loss = clipped(ratio, advantages) + 0.5 * value_loss - 0.01 * policy.entropy().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                monitor.step(loss)
        if not loss.isfinite():  # nothing can be sampled from such a policy
            break
    return env


@case(
    fault="non-finite",
    also=("unstable-formula",),
    onset=6,
    source="https://github.com/DLR-RM/stable-baselines3/pull/1028, https://github.com/jolibrain/wheatley/pull/93",
    tags=("rl", "ppo"),
)
def ppo_single_transition(attach: Attach) -> None:
    """The last minibatch holds one transition, and the standard deviation of one advantage is NaN."""
    train_small_minibatch(attach, skip_single=False)


@case(source="https://github.com/DLR-RM/stable-baselines3/pull/1028", tags=("rl", "ppo", "twin"))
def ppo_single_transition_fixed(attach: Attach) -> None:
    """A minibatch of one transition keeps its advantage as it is."""
    env = train_small_minibatch(attach, skip_single=True)
    assert sum(env.lengths[-20:]) > 1.6 * sum(env.lengths[:20])


def train_ratio(attach: Attach, *, stored: bool) -> CartPoles:
    """PPO with four epochs over each rollout."""
    setup(2)
    env, model = CartPoles(8, seed=2), ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor = attach(model, optimizer)
    for _ in range(20):
        data = collect(model, env, steps=64)
        advantages = (data.advantages - data.advantages.mean()) / (data.advantages.std() + 1e-8)
        for _ in range(4):
            for index in torch.randperm(len(data.actions)).split(128):
                states, actions = data.states[index], data.actions[index]
                logits, values = model(states)
                log_probs = Categorical(logits=logits).log_prob(actions)
                if stored:
                    old_log_probs = data.log_probs[index]
                else:
                    old_log_probs = Categorical(logits=model(states)[0]).log_prob(actions)
                ratio = (log_probs - old_log_probs).exp()
                loss = clipped(ratio, advantages[index]) + 0.5 * F.smooth_l1_loss(values, data.returns[index])
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                monitor.step(loss)
    return env


@case(
    fault="no-gradient",
    also=("dead-layer", "not-optimized", "loss-plateau"),
    layers=("policy",),
    onset=0,
    source=(
        "https://github.com/abhisheksuran/Reinforcement_Learning/issues/4, "
        "https://github.com/tensorforce/tensorforce/issues/312"
    ),
    tags=("rl", "ppo"),
)
def ppo_ratio_always_one(attach: Attach) -> None:
    """Old and new log-probabilities both come from the current policy, so the ratio is 1 and its gradient cancels."""
    train_ratio(attach, stored=False)


@case(source="https://github.com/abhisheksuran/Reinforcement_Learning/issues/4", tags=("rl", "ppo", "twin"))
def ppo_ratio_always_one_fixed(attach: Attach) -> None:
    """The old log-probabilities are those of the rollout."""
    env = train_ratio(attach, stored=True)
    assert sum(env.lengths[-10:]) / 10 > 2 * sum(env.lengths[:20]) / 20


@case(
    source="https://github.com/tensorflow/agents/issues/316 (the loss grows because the returns grow)",
    tags=("rl", "a2c", "odd"),
)
def a2c_value_error_grows(attach: Attach) -> None:
    """The loss more than doubles while the agent learns: longer episodes have larger returns to predict."""
    setup(4)
    env, model = CartPoles(16, seed=4), ActorCritic()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-3, eps=1e-5)
    monitor = attach(model, optimizer)
    for _ in range(350):
        data = collect(model, env, steps=16, lam=1.0)
        logits, values = model(data.states)
        policy = Categorical(logits=logits)
        policy_loss = -(policy.log_prob(data.actions) * data.advantages).mean()
        loss = policy_loss + 0.5 * F.mse_loss(values, data.returns) - 0.01 * policy.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        monitor.step(loss)
    assert sum(env.lengths[-20:]) / 20 > 2 * sum(env.lengths[:20]) / 20


def train_islands(attach: Attach, *, rescale: bool) -> tuple[nn.Module, Islands]:
    """A Q-network learns from a table of transitions, with a target network that is copied every 50 steps."""
    setup(5)
    data = Islands.sail(4000, seed=5)
    rewards = data.rewards / 3400 if rescale else data.rewards
    model = nn.Sequential(nn.Linear(25, 64), nn.ReLU(), nn.Linear(64, 4))
    target = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = attach(model, optimizer)
    places = torch.eye(25)
    for step in range(400):
        index = torch.randint(0, 4000, (64,))
        with torch.no_grad():
            best = target(places[data.nexts[index]]).max(1).values
        wanted = rewards[index] + 0.8 * best
        chosen = model(places[data.states[index]]).gather(1, data.actions[index, None]).squeeze(1)
        loss = F.mse_loss(chosen, wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss)
        if step % 50 == 49:
            target.load_state_dict(model.state_dict())
    return model, data


@case(
    fault="exploding-gradient",
    also=("learning-rate-too-high", "non-finite"),
    tolerate=("gradient-spike", "poor-initialization", "dead-relu"),
    onset=0,
    source="https://github.com/google-deepmind/open_spiel/issues/742 (the rewards of solitaire make the Q-values NaN)",
    tags=("rl", "dqn"),
)
def dqn_game_points(attach: Attach) -> None:
    """The rewards are the points of the game, up to 3400, and the squared errors are in the millions."""
    train_islands(attach, rescale=False)


@case(source="https://github.com/google-deepmind/open_spiel/issues/742", tags=("rl", "dqn", "twin"))
def dqn_game_points_fixed(attach: Attach) -> None:
    """The rewards are divided by the largest one."""
    model, data = train_islands(attach, rescale=True)
    place, points = torch.arange(25), torch.zeros(25)
    for _ in range(10):
        with torch.no_grad():
            place = Islands.move(place, model(torch.eye(25)[place]).argmax(1))
        points += data.values[place]
    assert points.mean() / 10 > 1.5 * data.values.mean()


def train_ships(attach: Attach, *, scale: Tensor) -> list[float]:
    """DDPG with a replay of all transitions so far; the actor is watched. Return the mean reward of each step."""
    setup(6)
    env = Ships(32, seed=6)
    actor = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1), nn.Tanh())
    critic = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    late_actor, late_critic = copy.deepcopy(actor), copy.deepcopy(critic)
    optimizer = torch.optim.Adam(actor.parameters(), lr=1e-3)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=2e-3)
    monitor = attach(actor, optimizer)
    replay: list[tuple[Tensor, ...]] = []
    rewards: list[float] = []
    for step in range(430):
        state = env.observe() / scale
        with torch.no_grad():
            thrust = (actor(state).squeeze(1) + 0.3 * torch.randn(32)).clamp(-1, 1)
        thrust = torch.rand(32) * 2 - 1 if step < 30 else thrust
        reward = env.step(thrust)
        replay.append((state, thrust[:, None], reward[:, None], env.observe() / scale))
        rewards.append(float(reward.mean()))
        if step < 30:
            continue
        picked = torch.randint(0, len(replay), (8,)).tolist()
        s, a, r, s2 = (torch.cat(column) for column in zip(*(replay[i] for i in picked), strict=True))
        with torch.no_grad():
            wanted = r + 0.95 * late_critic(torch.cat([s2, late_actor(s2)], 1))
        critic_loss = F.mse_loss(critic(torch.cat([s, a], 1)), wanted)
        critic_optimizer.zero_grad()
        critic_loss.backward()
        critic_optimizer.step()
        loss = -critic(torch.cat([s, actor(s)], 1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=s)
        with torch.no_grad():
            for late, now in zip(
                [*late_actor.parameters(), *late_critic.parameters()],
                [*actor.parameters(), *critic.parameters()],
                strict=True,
            ):
                late.lerp_(now, 0.02)
    return rewards


@case(
    fault="saturated-activation",
    also=("vanishing-gradient", "dead-layer", "no-gradient", "poor-initialization"),
    tolerate=("loss-plateau", "exploding-gradient", "dead-relu", "learning-rate-too-high"),
    onset=0,
    source="https://github.com/ZhihanLee/DDPG_Learning/issues/2, https://github.com/rmst/ddpg/issues/10",
    tags=("rl", "ddpg"),
)
def ddpg_raw_observations(attach: Attach) -> None:
    """Observations in metres, up to 500, drive the tanh of the actor to its ends; the actions are always -1 or 1."""
    train_ships(attach, scale=torch.ones(2))


@case(source="https://github.com/ZhihanLee/DDPG_Learning/issues/2", tags=("rl", "ddpg", "twin"))
def ddpg_raw_observations_fixed(attach: Attach) -> None:
    """Position and speed are divided by their largest values."""
    rewards = train_ships(attach, scale=torch.tensor([500.0, 20.0]))
    assert sum(rewards[-60:]) / 60 > 0.95 * sum(rewards[:30]) / 30


@case(
    fault="gradient-spike",
    also=("exploding-gradient", "unstable-formula"),
    tolerate=("loss-plateau", "learning-rate-too-high"),
    onset=218,
    source="https://github.com/NousResearch/atropos/issues/457",
    tags=("rl", "grpo"),
)
def grpo_group_of_equal_scores(attach: Attach) -> None:
    """Scores are divided by max(std, 1e-8) of their group; once all eight answers of a group are right, their
    advantages are 1e8.
    """
    setup(7)
    model = nn.Sequential(nn.Linear(20, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    monitor = attach(model, optimizer)
    for _ in range(300):
        a, b = torch.randint(0, 10, (2, 16))
        prompts = torch.cat([F.one_hot(a, 10), F.one_hot(b, 10)], 1).float()
        policy = Categorical(logits=model(prompts))
        answers = policy.sample(torch.Size([8]))  # (answers of a group, groups)
        scores = (answers == (a + b) % 10).float()
        advantages = scores / scores.std(0).clamp(min=1e-8)
        loss = -(advantages * policy.log_prob(answers)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=prompts)
