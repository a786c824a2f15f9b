"""Train agents on small games, as they should be and with faults, and count what is reported about their policies.

    python scripts/studies/policies.py --games cartpole bandit grid --seeds 1 --first 0
    python scripts/studies/policies.py --games pendulum catch digits --seeds 1 --first 100

The bound of `policy-divergence` was chosen on the games of the first line and measured on those of the second.
Agents: PPO in three usual settings, A2C and REINFORCE; DQN and discrete SAC, which have no policy gradient.
"""

# T = steps of a rollout, E = copies of a game, N = samples

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import games
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn import functional

import gradwatch
from gradwatch.records import Finding, Severity

GAMES: dict[str, Callable[[int, int], games.Game]] = {
    "cartpole": games.CartPole,
    "bandit": games.Bandit,
    "grid": games.Grid,
    "pendulum": games.Pendulum,
    "catch": games.Catch,
    "digits": games.Digits,
}
COPIES = 8
BAD_SHARE = 0.5
"""Share of the distance from random to good returns that a run must reach; below it, it has failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way to train an actor and a critic on rollouts.

    Args:
        rate: Learning rate of Adam.
        rollouts: Number of rollouts.
        length: Steps of a rollout.
        epochs, parts: Passes over a rollout, and mini-batches of each.
        clip: Half of the clip range of the ratio; None without a clamp, 0 without a ratio.
        entropy: Factor on the entropy that the loss subtracts.
        normalize: Whether advantages are normalized.
        critic: Whether a critic gives the advantages.
        old: Where the ratio's log-probability comes from: the `rollout`, an `epoch`, the `same` pass, or `other`
            samples.
        scale: Factor on the rewards.
        is_faulty: Whether it is a mistake.
    """

    rate: float
    rollouts: int = 30
    length: int = 32
    epochs: int = 4
    parts: int = 4
    clip: float | None = 0.2
    entropy: float = 0.01
    normalize: bool = True
    critic: bool = True
    old: str = "rollout"
    scale: float = 1.0
    is_faulty: bool = False


PPO = Way(rate=1e-3)
ONCE = Way(rate=2e-3, length=16, epochs=1, parts=1, clip=0.0, rollouts=250, normalize=False)
WAYS = {
    "ppo": PPO,
    "ppo, 10 epochs": replace(PPO, rate=3e-4, epochs=10, entropy=0.0),
    "ppo, 20 epochs of one batch": replace(PPO, rate=1e-3, epochs=20, parts=1, entropy=0.0),
    "ppo, one epoch": replace(PPO, rate=2e-3, epochs=1, parts=1, rollouts=100),
    "a2c": ONCE,
    "a2c, no entropy": replace(ONCE, entropy=0.0, rate=3e-3),
    "reinforce": replace(ONCE, rate=5e-3, critic=False, normalize=True, length=64, entropy=0.0, rollouts=100),
    "reinforce, returns": replace(ONCE, rate=3e-3, critic=False, normalize=False, length=64, entropy=0.0, rollouts=100),
    "ppo, rate x10": replace(PPO, rate=1e-2, epochs=20, rollouts=20, is_faulty=True),
    "ppo, rate x30": replace(PPO, rate=3e-2, is_faulty=True),
    "ppo, rate x10, no clip": replace(PPO, rate=1e-2, epochs=20, clip=None, rollouts=20, is_faulty=True),
    "ppo, entropy added": replace(PPO, entropy=-0.1, is_faulty=True),
    "ppo, old of the epoch": replace(PPO, rate=3e-3, epochs=20, old="epoch", rollouts=20, is_faulty=True),
    "ppo, old of the same pass": replace(PPO, rate=3e-3, epochs=20, old="same", rollouts=20, is_faulty=True),
    "ppo, old of other samples": replace(PPO, old="other", is_faulty=True),
    "a2c, rate x30": replace(ONCE, rate=6e-2, is_faulty=True),
    "a2c, rewards x100": replace(ONCE, scale=100.0, is_faulty=True),
    "reinforce, rate x30": replace(
        ONCE, rate=0.15, critic=False, normalize=True, length=64, rollouts=100, is_faulty=True
    ),
}
OFF_POLICY = ("dqn", "sac")


class Agent(nn.Module):
    """An actor and a critic."""

    def __init__(self, size: int, actions: int, width: int = 64) -> None:
        super().__init__()
        self.actor, self.critic = (
            nn.Sequential(nn.Linear(size, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, out))
            for out in (actions, 1)
        )
        with torch.no_grad():
            self.actor.get_parameter("4.weight").mul_(0.01)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits of the actions, and the value."""
        return self.actor(x), self.critic(x)[..., 0]


class Rollout(NamedTuple):
    """Samples of a rollout, flat."""

    seen: Tensor
    action: Tensor
    old: Tensor
    advantage: Tensor
    target: Tensor


class Course(NamedTuple):
    """What a run showed: the mean return in each tenth of its updates, its policy, and its findings."""

    name: str
    game: str
    seed: int
    returns: list[float]
    policy: dict[str, list[float]]
    findings: list[tuple[str, int, int, str]]

    @property
    def share(self) -> float:
        """The last returns, as a share of the distance from random to good ones."""
        game = GAMES[self.game]
        share = (np.mean(self.returns[-2:]) - game.worst) / (game.best - game.worst)  # type: ignore[attr-defined]
        return float(share)


class Returns:
    """Adds up rewards to returns of episodes."""

    def __init__(self) -> None:
        self._sum_E = np.zeros(COPIES)
        self.done: list[float] = []

    def add(self, reward_E: games.Floats, is_over_E: games.Flags) -> None:
        """Add a step."""
        self._sum_E = self._sum_E + reward_E
        self.done += self._sum_E[is_over_E].tolist()
        self._sum_E[is_over_E] = 0

    def take(self) -> float:
        """Return the mean of the episodes since the last call."""
        mean = float(np.mean(self.done)) if self.done else float("nan")
        self.done = []
        return mean


def rollout(agent: Agent, game: games.Game, way: Way, returns: Returns) -> Rollout:
    """Play some steps, and return them with their advantages (Schulman et al. 2016)."""
    seen, actions, olds, rewards, overs, values = [], [], [], [], [], []
    with torch.no_grad():
        for _ in range(way.length):
            x = torch.from_numpy(game.observe())
            logits, value = agent(x)
            choice = Categorical(logits=logits)
            action = choice.sample()
            reward_E, is_over_E = game.step(action.numpy())
            returns.add(reward_E, is_over_E)
            seen.append(x)
            actions.append(action)
            olds.append(choice.log_prob(action))
            values.append(value)
            rewards.append(torch.from_numpy(way.scale * reward_E).float())
            overs.append(torch.from_numpy(is_over_E).float())
        after = agent(torch.from_numpy(game.observe()))[1]
    if not way.critic:
        values, after = [torch.zeros_like(v) for v in values], torch.zeros_like(after)
    later, advantages = torch.zeros(COPIES), []
    lam = 0.95 if way.critic else 1.0
    for reward, over, value in zip(reversed(rewards), reversed(overs), reversed(values), strict=True):
        error = reward + 0.99 * (1 - over) * after - value
        later = error + 0.99 * lam * (1 - over) * later
        advantages.append(later)
        after = value
    advantage, value = torch.stack(advantages[::-1]).flatten(), torch.stack(values).flatten()
    target = advantage + value
    if not way.critic and not way.normalize:
        advantage = advantage - advantage.mean()  # a baseline
    return Rollout(torch.cat(seen), torch.cat(actions), torch.cat(olds), advantage, target)


def surrogate(agent: Agent, batch: Rollout, way: Way) -> Tensor:
    """Return the loss of a mini-batch."""
    logits, value = agent(batch.seen)
    choice = Categorical(logits=logits)
    log_prob, advantage = choice.log_prob(batch.action), batch.advantage
    if way.normalize:
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    if way.clip == 0:
        gain = (log_prob * advantage).mean()
    else:
        old = log_prob.detach() if way.old == "same" else batch.old.roll(1) if way.old == "other" else batch.old
        ratio = (log_prob - old).exp()
        gain = (ratio * advantage).mean()
        if way.clip is not None:
            gain = torch.min(ratio * advantage, ratio.clamp(1 - way.clip, 1 + way.clip) * advantage).mean()
    loss: Tensor = -gain - way.entropy * choice.entropy().mean()
    if way.critic:
        loss = loss + 0.5 * functional.mse_loss(value, batch.target)
    return loss


def train(name: str, game_name: str, seed: int) -> Course:
    """Train in one way from one seed under `watch`."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    if name in OFF_POLICY:
        return train_off_policy(name, game_name, seed)
    way, game, returns = WAYS[name], GAMES[game_name](COPIES, seed), Returns()
    agent = Agent(game.size, game.actions)
    optimizer = torch.optim.Adam(agent.parameters(), lr=way.rate, eps=1e-5)
    found: list[Finding] = []
    monitor = gradwatch.watch(agent, optimizer, on_finding=found.append, schedule=gradwatch.Schedule(budget=0))
    means: list[float] = []
    for number in range(way.rollouts):
        played = rollout(agent, game, way, returns)
        for _ in range(way.epochs):
            if way.old == "epoch":
                with torch.no_grad():
                    played = played._replace(old=Categorical(logits=agent(played.seen)[0]).log_prob(played.action))
            for part in torch.randperm(len(played.action)).chunk(way.parts):
                batch = Rollout(*(column[part] for column in played))
                loss = surrogate(agent, batch, way)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
                monitor.step(loss, batch=batch.seen)
        if (number + 1) % (way.rollouts // 10) == 0:
            means.append(returns.take())
    return finish(name, game_name, seed, means, monitor, found)


def train_off_policy(name: str, game_name: str, seed: int) -> Course:
    """Train DQN or discrete SAC (Christodoulou 2019) from a buffer."""
    game, returns, means = GAMES[game_name](COPIES, seed), Returns(), list[float]()
    agent, frozen = Agent(game.size, game.actions), Agent(game.size, game.actions)
    agent.critic[-1] = nn.Linear(64, game.actions)
    frozen.critic[-1] = nn.Linear(64, game.actions)
    frozen.load_state_dict(agent.state_dict())
    watched = agent if name == "sac" else agent.critic
    optimizer = torch.optim.Adam(watched.parameters(), lr=1e-3)
    found: list[Finding] = []
    monitor = gradwatch.watch(watched, optimizer, on_finding=found.append, schedule=gradwatch.Schedule(budget=0))
    buffer: deque[tuple[Tensor, ...]] = deque(maxlen=500)
    rng = np.random.default_rng(seed)
    for update in range(500):
        for _ in range(4):
            x = torch.from_numpy(game.observe())
            with torch.no_grad():
                best = agent.critic(x).argmax(-1)
                action = Categorical(logits=agent.actor(x)).sample() if name == "sac" else best
            if name == "dqn":
                chance = max(0.05, 1 - update / 200)
                random = torch.from_numpy(rng.integers(0, game.actions, COPIES))
                action = torch.where(torch.from_numpy(rng.random(COPIES) < chance), random, action)
            reward_E, is_over_E = game.step(action.numpy())
            returns.add(reward_E, is_over_E)
            after = torch.from_numpy(game.observe())
            buffer.append((x, action, torch.from_numpy(reward_E).float(), torch.from_numpy(is_over_E).float(), after))
        rows = [buffer[i] for i in rng.integers(0, len(buffer), 8)]
        x, action, reward, over, after = (torch.cat(column) for column in zip(*rows, strict=True))
        value_NA = agent.critic(x)
        with torch.no_grad():
            later_NA = frozen.critic(after)
            p_NA = agent.actor(after).softmax(-1)
            soft_N = (p_NA * (later_NA - 0.05 * p_NA.clamp_min(1e-8).log())).sum(-1)
            later_N = soft_N if name == "sac" else later_NA.amax(-1)
        target = reward + 0.99 * (1 - over) * later_N
        loss = functional.mse_loss(value_NA.gather(1, action[:, None])[:, 0], target)
        if name == "sac":
            log_NA = agent.actor(x).log_softmax(-1)
            loss = loss + (log_NA.exp() * (0.05 * log_NA - value_NA.detach())).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x)
        with torch.no_grad():
            for slow, fast in zip(frozen.parameters(), agent.parameters(), strict=True):
                slow.lerp_(fast, 0.02)
        if (update + 1) % 50 == 0:
            means.append(returns.take())
    return finish(name, game_name, seed, means, monitor, found)


def finish(
    name: str, game: str, seed: int, means: list[float], monitor: gradwatch.Monitor, found: list[Finding]
) -> Course:
    """Close the monitor, and return the course."""
    monitor.close()
    run = monitor.history
    policy = {key: sampled(run[f"policy.{key}"]) for key in ("entropy", "divergence", "clipped_frac")}
    findings = [(f.kind, f.step, int(f.severity), f.message) for f in found]
    return Course(name, game, seed, means, policy, findings)


def sampled(values_T: games.Floats) -> list[float]:
    """Return the values at the steps with a reading."""
    return [float(value) for value in values_T if not np.isnan(value)]


def line(course: Course) -> str:
    """Return one line about a run."""
    policy = course.policy
    shown = " ".join(
        f"{key} {np.array2string(np.array(values)[:: max(1, len(values) // 8)], precision=3, max_line_width=400)}"
        for key, values in policy.items()
        if values
    )
    kinds = ", ".join(f"{kind} {step}" for kind, step, severity, _ in course.findings if severity >= Severity.WARNING)
    return f"{course.game:9}{course.name:28}{course.seed:4} reached {course.share:5.2f} | {shown} | {kinds}"


def table(courses: list[Course], kind: str) -> str:
    """Return the counts of a kind of finding, by way."""
    lines = [
        "| way | runs | failed | reported | of those that failed | any other warning |",
        "|---|---|---|---|---|---|",
    ]
    for name in (*WAYS, *OFF_POLICY):
        mine = [c for c in courses if c.name == name]
        is_failed = [c.share < BAD_SHARE for c in mine]
        warned = [{f[0] for f in c.findings if f[2] >= Severity.WARNING} for c in mine]
        named = [kind in kinds for kinds in warned]
        both = sum(a and b for a, b in zip(is_failed, named, strict=True))
        others = sum(bool(kinds - {kind}) for kinds in warned)
        mark = " (fault)" if name in WAYS and WAYS[name].is_faulty else ""
        lines.append(f"| {name}{mark} | {len(mine)} | {sum(is_failed)} | {sum(named)} | {both} | {others} |")
    return "\n".join(lines)


def _train(key: tuple[str, str, int]) -> Course:
    return train(*key)


def main() -> None:
    """Train all ways on some games from some seeds, and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--games", nargs="+", choices=GAMES, default=list(GAMES), help="games to play")
    parser.add_argument("--ways", nargs="+", default=[*WAYS, *OFF_POLICY], help="ways to train")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each way and game")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--json", help="file for all runs")
    args = parser.parse_args()
    seeds = range(args.first, args.first + args.seeds)
    keys = [(name, game, seed) for game in args.games for name in args.ways for seed in seeds]
    courses = []
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        for course in pool.imap(_train, keys):
            courses.append(course)
            print(line(course), flush=True)
            if args.json:
                with Path(args.json).open("a", encoding="utf-8") as file:
                    file.write(json.dumps(course._asdict()) + "\n")
    print(table(courses, "policy-divergence"))


if __name__ == "__main__":
    main()
