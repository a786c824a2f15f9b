"""Environments and texts that the scripts share. No models, no faults."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from pydoc_data.topics import topics

import torch
from torch import Tensor

WORD = re.compile(r"[a-z]{2,}")


class CartPoles:
    """Several cart-poles next to each other (Barto et al. 1983). A fallen pole, or one of 200 steps, starts again."""

    def __init__(self, count: int, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.state = self._draw(count)
        self.age = torch.zeros(count)
        self.lengths: list[float] = []

    def _draw(self, count: int) -> Tensor:
        return torch.rand(count, 4, generator=self.generator) * 0.1 - 0.05

    def step(self, action: Tensor) -> tuple[Tensor, Tensor]:
        """Push each cart left (0) or right (1) and return the rewards and which episodes ended."""
        x, v, angle, spin = self.state.unbind(1)
        force = 20.0 * action.float() - 10.0
        pull = (force + 0.05 * spin**2 * angle.sin()) / 1.1
        turn = (9.8 * angle.sin() - angle.cos() * pull) / (0.5 * (4 / 3 - 0.1 * angle.cos() ** 2 / 1.1))
        push = pull - 0.05 * turn * angle.cos() / 1.1
        self.state = torch.stack([x + 0.02 * v, v + 0.02 * push, angle + 0.02 * spin, spin + 0.02 * turn], 1)
        self.age += 1
        done = (self.state[:, 0].abs() > 2.4) | (self.state[:, 2].abs() > 12 * math.pi / 180) | (self.age >= 200)
        if done.any():
            self.lengths += self.age[done].tolist()
            self.state[done] = self._draw(int(done.sum()))
            self.age[done] = 0
        return torch.ones(len(done)), done.float()


class Ships:
    """Ships that drift up to 500 m from a buoy, at up to 20 m/s, and may thrust by -1 to 1. Units are m and m/s."""

    def __init__(self, count: int, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.position = torch.rand(count, generator=self.generator) * 1000 - 500
        self.speed = torch.rand(count, generator=self.generator) * 20 - 10

    def observe(self) -> Tensor:
        """Return position and speed of each ship, (ships, 2)."""
        return torch.stack([self.position, self.speed], 1)

    def step(self, thrust: Tensor) -> Tensor:
        """Move one second and return the rewards: being far and thrusting cost. One ship in 60 is moved."""
        self.speed = (self.speed + 3 * thrust).clamp(-20, 20)
        self.position = (self.position + 2 * self.speed).clamp(-500, 500)
        reward = -((self.position / 500) ** 2) - 0.3 * thrust**2
        moved = torch.rand(len(reward), generator=self.generator) < 1 / 60
        fresh = torch.rand(len(reward), generator=self.generator) * 1000 - 500
        self.position = torch.where(moved, fresh, self.position)
        return reward


@dataclass(frozen=True)
class Islands:
    """A walk over 5 x 5 islands with treasures of 50 to 3400 points, as one long table of random transitions."""

    states: Tensor
    actions: Tensor
    rewards: Tensor
    nexts: Tensor
    values: Tensor

    @staticmethod
    def sail(count: int, seed: int) -> Islands:
        """Return `count` transitions from random islands by random moves."""
        generator = torch.Generator().manual_seed(seed)
        values = torch.randint(50, 900, (25,), generator=generator).float()
        values[18] = 3400.0
        states = torch.randint(0, 25, (count,), generator=generator)
        actions = torch.randint(0, 4, (count,), generator=generator)
        nexts = Islands.move(states, actions)
        return Islands(states, actions, values[nexts], nexts, values)

    @staticmethod
    def move(states: Tensor, actions: Tensor) -> Tensor:
        """Return the islands that moves north, south, west and east lead to."""
        row, column = states // 5, states % 5
        row = (row + torch.tensor([-1, 1, 0, 0])[actions]).clamp(0, 4)
        column = (column + torch.tensor([0, 0, -1, 1])[actions]).clamp(0, 4)
        return row * 5 + column


@lru_cache(None)
def letters() -> tuple[Tensor, int]:
    """Return 200,000 characters of Python's help topics as ids, and the size of the alphabet."""
    text = "\n".join(topics[name] for name in sorted(topics))[:200_000]
    alphabet = sorted(set(text))
    index = {letter: i for i, letter in enumerate(alphabet)}
    return torch.tensor([index[letter] for letter in text]), len(alphabet)


def excerpts(ids: Tensor, length: int, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return random excerpts of a text and, for each character, the next one."""
    start = torch.randint(0, len(ids) - length - 1, (count,), generator=generator)
    index = start[:, None] + torch.arange(length)
    return ids[index], ids[index + 1]


@lru_cache(None)
def lines(subjects: int = 6, words: int = 600, length: int = 16) -> tuple[Tensor, Tensor]:
    """Return the lines of the longest help topics as word ids, padded with 0, and the topic of each line.

    Blank lines are left out. A line without a frequent word is all padding.
    """
    longest = sorted(topics, key=lambda name: -len(topics[name]))[:subjects]
    counts = Counter(WORD.findall(" ".join(topics[name] for name in longest).lower()))
    index = {word: i + 1 for i, (word, _) in enumerate(counts.most_common(words))}
    rows: list[list[int]] = []
    labels: list[int] = []
    for label, name in enumerate(longest):
        for line in topics[name].splitlines():
            if not line.strip():
                continue
            known = [index[word] for word in WORD.findall(line.lower()) if word in index][:length]
            rows.append(known + [0] * (length - len(known)))
            labels.append(label)
    return torch.tensor(rows), torch.tensor(labels)
