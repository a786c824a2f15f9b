"""Agents: a pole whose policy stands still, one whose memories are all the same, a probe, and noughts and crosses."""

from __future__ import annotations

import copy
import math
import random

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.protocol import Attach, case

Array = npt.NDArray[np.float32]


class Pole:
    """One cart-pole. It moves its state in place, as simulators do."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.state: Array = np.zeros(4, np.float32)
        self.age = 0

    def reset(self) -> Array:
        self.state[:] = self.random.uniform(-0.05, 0.05, 4)
        self.age = 0
        return self.state

    def step(self, action: int) -> tuple[Array, float, bool]:
        """Push the cart left (0) or right (1) and return the state, the reward, and whether the episode is over."""
        _, v, angle, spin = (float(value) for value in self.state)
        pull = (20.0 * action - 10.0 + 0.05 * spin**2 * math.sin(angle)) / 1.1
        turn = (9.8 * math.sin(angle) - math.cos(angle) * pull) / (0.5 * (4 / 3 - 0.1 * math.cos(angle) ** 2 / 1.1))
        push = pull - 0.05 * turn * math.cos(angle) / 1.1
        self.state += 0.02 * np.array([v, push, spin, turn], np.float32)
        self.age += 1
        fallen = abs(self.state[0]) > 2.4 or abs(self.state[2]) > 12 * math.pi / 180
        return self.state, 1.0, bool(fallen or self.age >= 200)


# ------------------------------------------------------------------------------------ numbers instead of a graph


def train_reinforce(attach: Attach, *, repaired: bool) -> float:
    """Return the mean length of the last 30 episodes."""
    torch.manual_seed(131)
    world = Pole(seed=1)
    policy = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)
    monitor = attach(policy, optimizer)
    lengths = []
    for _ in range(300):
        state, done = world.reset(), False
        log_probs, rewards, seen = [], [], []
        while not done:
            seen.append(torch.tensor(state))
            choice = torch.distributions.Categorical(logits=policy(seen[-1]))
            action = choice.sample()
            log_probs.append(choice.log_prob(action))
            state, reward, done = world.step(int(action))
            rewards.append(reward)
        returns: list[float] = []
        ahead = 0.0
        for reward in reversed(rewards):
            ahead = reward + 0.98 * ahead
            returns.insert(0, ahead)
        gains = torch.tensor(returns)
        gains = (gains - gains.mean()) / (gains.std() + 1e-6)
        chosen = torch.stack(log_probs) if repaired else torch.tensor([p.item() for p in log_probs], requires_grad=True)
        loss = -(chosen * gains).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=torch.stack(seen))
        lengths.append(len(rewards))
    return sum(lengths[-30:]) / 30


@case(
    fault="no-gradient",
    also=("not-optimized", "loss-plateau"),
    onset=0,
    source="https://github.com/kengz/SLM-Lab/pull/133",
    tags=("rl", "reinforce"),
)
def log_probabilities_as_numbers(attach: Attach) -> None:
    """The logarithms of the probabilities are made into a new tensor, which is told to require a gradient. `backward`
    works, ends at that tensor, and the policy stays as it is. Reported in https://github.com/kengz/SLM-Lab/pull/133,
    https://github.com/isayev/ReLeaSE/issues/39 and
    https://github.com/Quantum-Cheese/DeepReinforcementLearning_Pytorch/issues/1.
    """
    train_reinforce(attach, repaired=False)


# ------------------------------------------------------------------------------------ memories that are all the same


def train_with_replay(attach: Attach, *, copies: bool) -> float:
    """Return the mean length of the last 20 episodes."""
    torch.manual_seed(132)
    chance = random.Random(2)
    world = Pole(seed=2)
    net = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    target = copy.deepcopy(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    monitor = attach(net, optimizer, loss_fn=F.smooth_l1_loss)
    replay: list[tuple[Array, int, float, Array, bool]] = []
    lengths: list[int] = []
    state, step = world.reset(), 0
    while step < 3000:
        if chance.random() < max(0.05, 1 - len(replay) / 1500):
            action = chance.randrange(2)
        else:
            with torch.no_grad():
                action = int(net(torch.tensor(state)).argmax())
        before = state.copy() if copies else state
        state, reward, done = world.step(action)
        replay.append((before, action, reward, state.copy() if copies else state, done))
        if done:
            lengths.append(world.age)
            state = world.reset()
        if len(replay) < 200:
            continue
        s, a, r, s2, end = zip(*chance.sample(replay, 64), strict=True)
        states, after = torch.tensor(np.stack(s)), torch.tensor(np.stack(s2))
        with torch.no_grad():
            wanted = torch.tensor(r) + 0.97 * target(after).max(1).values * (1 - torch.tensor(end).float())
        loss = F.smooth_l1_loss(net(states).gather(1, torch.tensor(a)[:, None]).squeeze(1), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=states)
        step += 1
        if step % 50 == 0:
            target.load_state_dict(net.state_dict())
    return sum(lengths[-20:]) / 20


@case(
    fault="loss-plateau",
    also=("constant-batch",),
    tolerate=("oscillating-gradient",),
    onset=0,
    source="https://github.com/google-deepmind/dm_control/issues/34",
    tags=("rl", "dqn", "data"),
)
def memories_of_one_array(attach: Attach) -> None:
    """The simulator moves its state in place and returns it, and the replay stores what it gets without a copy: all
    memories are the same array, which holds the present state. Reported in
    https://github.com/google-deepmind/dm_control/issues/34, https://github.com/MultiAgentLearning/playground/pull/234,
    https://github.com/Farama-Foundation/SuperSuit/pull/116 and
    https://github.com/Itomigna2/Muesli-lunarlander/issues/1.
    """
    train_with_replay(attach, copies=False)


# ------------------------------------------------------------------------------------ the logarithm of a thrust


class ThrustPolicy(nn.Module):
    """Choose a thrust from -2 to 2 by a squashed Gaussian."""

    def __init__(self, *, repaired: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU())
        self.mean, self.log_std = nn.Linear(48, 1), nn.Linear(48, 1)
        self.repaired = repaired

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(state)
        std = self.log_std(hidden).clamp(-5, 1).exp()
        normal = torch.distributions.Normal(self.mean(hidden), std, validate_args=False)
        raw = normal.rsample()
        thrust = 2.0 * torch.tanh(raw)
        squashed = torch.tanh(raw) if self.repaired else thrust
        return thrust, normal.log_prob(raw) - torch.log(1 - squashed.pow(2) + 1e-6)


def move(state: Tensor, thrust: Tensor) -> tuple[Tensor, Tensor]:
    """Return where a probe is after one second, and the reward for being near the middle with little thrust."""
    speed = (state[:, 1:] + 0.15 * thrust).clamp(-1, 1)
    place = (state[:, :1] + 0.2 * speed).clamp(-1, 1)
    return torch.cat([place, speed], 1), -(place**2) - 0.02 * thrust**2


def train_probe(attach: Attach, *, repaired: bool) -> float:
    """Return the mean distance from the middle after 15 seconds."""
    torch.manual_seed(133)
    actor = ThrustPolicy(repaired=repaired)
    critic = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    late = copy.deepcopy(critic)
    model = nn.ModuleDict({"actor": actor, "critic": critic})
    optimizers = [torch.optim.Adam(actor.parameters(), lr=1e-3), torch.optim.Adam(critic.parameters(), lr=2e-3)]
    monitor = attach(model, optimizers)
    for _ in range(500):
        state = 2 * torch.rand(128, 2) - 1
        with torch.no_grad():
            thrust = actor(state)[0]
            after, reward = move(state, thrust)
            next_thrust, log_prob = actor(after)
            wanted = reward + 0.9 * (late(torch.cat([after, next_thrust], 1)) - 0.02 * log_prob)
        value_loss = F.mse_loss(critic(torch.cat([state, thrust], 1)), wanted)
        optimizers[1].zero_grad()
        value_loss.backward()
        optimizers[1].step()
        thrust, log_prob = actor(state)
        actor_loss = (0.02 * log_prob - critic(torch.cat([state, thrust], 1))).mean()
        optimizers[0].zero_grad()
        actor_loss.backward()
        optimizers[0].step()
        with torch.no_grad():
            for old, new in zip(late.parameters(), critic.parameters(), strict=True):
                old.lerp_(new, 0.02)
        monitor.step(value_loss, batch=state)
    state = 2 * torch.rand(500, 2) - 1
    with torch.no_grad():
        for _ in range(15):
            state = move(state, actor(state)[0])[0]
    return state[:, 0].abs().mean().item()


@case(
    fault="non-finite",
    also=("unstable-formula",),
    onset=0,
    source="https://github.com/philtabor/Actor-Critic-Methods-Paper-To-Code/issues/7",
    tags=("rl", "sac"),
)
def logarithm_of_the_scaled_action(attach: Attach) -> None:
    """The correction for the squashing is log(1 - a^2), and `a` is the action after its scaling to -2..2: the logarithm
    of a negative number. Reported in https://github.com/philtabor/Actor-Critic-Methods-Paper-To-Code/issues/7,
    https://github.com/cpnota/autonomous-learning-library/issues/139 and
    https://github.com/philtabor/Youtube-Code-Repository/issues/59.
    """
    train_probe(attach, repaired=False)


@case(source="the repaired twin of `logarithm_of_the_scaled_action`", tags=("rl", "sac", "twin"))
def logarithm_of_the_squashed_action(attach: Attach) -> None:
    """The correction uses the action before its scaling."""
    assert train_probe(attach, repaired=True) < 0.2


# ------------------------------------------------------------------------------------ an odd recipe

LINES = [(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)]


def winner(board: list[int]) -> int:
    """Return 1 or -1 for three in a row, else 0."""
    return next((board[a] for a, b, c in LINES if board[a] and board[a] == board[b] == board[c]), 0)


def choose(net: nn.Module, board: list[int], side: int) -> int:
    """Return the free square after which the board is best for a side."""
    free = [square for square in range(9) if not board[square]]
    after = torch.tensor([board] * len(free)).float()
    after[range(len(free)), free] = float(side)
    with torch.no_grad():
        return free[int((side * net(after).squeeze(1)).argmax())]


@case(source="Tesauro 1995, TD-Gammon: a value learned from games against itself", tags=("rl", "self-play", "odd"))
def noughts_against_itself(attach: Attach) -> None:
    """A network plays noughts and crosses against itself and learns who wins. It plays better as it learns, so that the
    games change and the loss goes up and down.
    """
    torch.manual_seed(134)
    chance = random.Random(4)
    net = nn.Sequential(nn.Linear(9, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1), nn.Tanh())
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    monitor = attach(net, optimizer, loss_fn=F.mse_loss)

    def play(wild: float, against: float) -> tuple[list[list[int]], int]:
        board, boards, side = [0] * 9, [], 1
        while not winner(board) and 0 in board:
            free = [square for square in range(9) if not board[square]]
            is_wild = chance.random() < (wild if side == 1 else against)
            board = board.copy()
            board[chance.choice(free) if is_wild else choose(net, board, side)] = side
            boards.append(board)
            side = -side
        return boards, winner(board)

    def wins() -> float:
        return sum(play(0.0, 1.0)[1] == 1 for _ in range(100)) / 100

    before = wins()
    for step in range(700):
        boards: list[list[int]] = []
        results: list[float] = []
        for _ in range(8):
            game, result = play(max(0.1, 0.5 - step / 1000), max(0.1, 0.5 - step / 1000))
            boards += game
            results += [float(result)] * len(game)
        x, y = torch.tensor(boards).float(), torch.tensor(results)[:, None]
        loss = F.mse_loss(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x)
    after = wins()
    assert after > max(0.75, before), after
