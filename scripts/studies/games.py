"""Small control problems in NumPy, several copies at once, for `studies/policies.py`."""

# E = copies of a game

from __future__ import annotations

import math
from typing import Any, Protocol, final

import numpy as np
import torch
from numpy.typing import NDArray

from gradwatch.data import digits

Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


class Game(Protocol):
    """Copies of a game, each of which starts again when it is over.

    Attributes:
        size: Numbers in an observation.
        actions: Number of actions.
        worst, best: Usual return of an episode at random and of a good policy.
    """

    size: int
    actions: int
    worst: float
    best: float

    def observe(self) -> Floats:
        """Return the observation of each copy, of shape (E, size), float32."""
        ...

    def step(self, action_E: Ints) -> tuple[Floats, Flags]:
        """Return rewards, and which episodes are over."""
        ...


@final
class CartPole:
    """A pole on a cart, by the equations of Barto, Sutton and Anderson (1983), for at most 200 steps."""

    size, actions, worst, best = 4, 2, 22.0, 150.0

    def __init__(self, copies: int, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._state_E4 = self._rng.uniform(-0.05, 0.05, (copies, 4))
        self._age_E = np.zeros(copies, np.int64)

    def observe(self) -> Floats:
        """Return position, speed, angle and its speed."""
        return self._state_E4.astype(np.float32)

    def step(self, action_E: Ints) -> tuple[Floats, Flags]:
        """Push the carts left or right."""
        _, speed, angle, turn = self._state_E4.T
        force = np.where(action_E == 1, 10.0, -10.0)
        push = (force + 0.05 * turn**2 * np.sin(angle)) / 1.1
        bend = (9.8 * np.sin(angle) - np.cos(angle) * push) / (0.5 * (4 / 3 - 0.1 * np.cos(angle) ** 2 / 1.1))
        slide = push - 0.05 * bend * np.cos(angle) / 1.1
        change = np.stack([speed, slide, turn, bend], 1)
        self._state_E4 = self._state_E4 + 0.02 * change
        self._age_E += 1
        is_over_E = (
            (np.abs(self._state_E4[:, 0]) > 2.4) | (np.abs(self._state_E4[:, 2]) > 0.2095) | (self._age_E >= 200)
        )
        self._age_E[is_over_E] = 0
        self._state_E4[is_over_E] = self._rng.uniform(-0.05, 0.05, (int(is_over_E.sum()), 4))
        return np.ones(len(action_E)), is_over_E


@final
class Bandit:
    """Ten arms with noisy rewards. Its solution is a policy with an entropy of 0."""

    size, actions, worst, best = 1, 10, 0.0, 1.5

    def __init__(self, copies: int, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._mean_A = np.linspace(-1.5, 1.5, 10)[self._rng.permutation(10)]
        self._copies = copies

    def observe(self) -> Floats:
        """Return a constant."""
        return np.ones((self._copies, 1), np.float32)

    def step(self, action_E: Ints) -> tuple[Floats, Flags]:
        """Pull an arm."""
        return self._mean_A[action_E] + self._rng.standard_normal(self._copies), np.ones(self._copies, np.bool_)


@final
class Grid:
    """Ways to a corner of 5 x 5 fields, from any field, in at most 30 steps."""

    size, actions, worst, best = 25, 4, 0.1, 0.9
    MOVES = np.array([[0, 1], [1, 0], [0, -1], [-1, 0]])

    def __init__(self, copies: int, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._place_E2 = self._rng.integers(0, 5, (copies, 2))
        self._age_E = np.zeros(copies, np.int64)

    def observe(self) -> Floats:
        """Return the field, one-hot."""
        return np.asarray(np.eye(25, dtype=np.float32)[self._place_E2 @ [5, 1]])

    def step(self, action_E: Ints) -> tuple[Floats, Flags]:
        """Move by one field."""
        self._place_E2 = np.clip(self._place_E2 + self.MOVES[action_E], 0, 4)
        self._age_E += 1
        is_there_E = (self._place_E2 == 4).all(1)
        is_over_E = is_there_E | (self._age_E >= 30)
        self._age_E[is_over_E] = 0
        self._place_E2[is_over_E] = self._rng.integers(0, 5, (int(is_over_E.sum()), 2))
        return is_there_E - 0.02, is_over_E


@final
class Pendulum:
    """A pendulum that three torques swing up and hold, in 100 steps. Rewards are costs."""

    size, actions, worst, best = 3, 3, -75.0, -25.0

    def __init__(self, copies: int, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._angle_E = self._rng.uniform(-math.pi, math.pi, copies)
        self._speed_E = self._rng.uniform(-1, 1, copies)
        self._age_E = np.arange(copies) * 100 // copies

    def observe(self) -> Floats:
        """Return direction and speed."""
        parts = [np.cos(self._angle_E), np.sin(self._angle_E), self._speed_E / 8]
        return np.stack(parts, 1).astype(np.float32)

    def step(self, action_E: Ints) -> tuple[Floats, Flags]:
        """Apply a torque."""
        angle_E = (self._angle_E + math.pi) % (2 * math.pi) - math.pi
        cost_E = (angle_E**2 + 0.1 * self._speed_E**2) / 10
        self._speed_E = np.clip(self._speed_E + 0.75 * np.sin(angle_E) + 0.3 * (action_E - 1), -8, 8)
        self._angle_E = angle_E + 0.05 * self._speed_E
        self._age_E += 1
        is_over_E = self._age_E >= 100
        number = int(is_over_E.sum())
        self._age_E[is_over_E] = 0
        self._angle_E[is_over_E] = self._rng.uniform(-math.pi, math.pi, number)
        self._speed_E[is_over_E] = self._rng.uniform(-1, 1, number)
        return -cost_E, is_over_E


@final
class Catch:
    """A ball that falls through 7 rows of 5 fields, and a paddle to catch it (bsuite, Osband et al. 2020)."""

    size, actions, worst, best = 40, 3, -0.6, 0.9

    def __init__(self, copies: int, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._row_E = np.zeros(copies, np.int64)
        self._ball_E, self._paddle_E = self._rng.integers(0, 5, copies), np.full(copies, 2)

    def observe(self) -> Floats:
        """Return the fields of ball and paddle, one-hot."""
        ball = np.eye(35, dtype=np.float32)[5 * self._row_E + self._ball_E]
        return np.concatenate([ball, np.eye(5, dtype=np.float32)[self._paddle_E]], 1)

    def step(self, action_E: Ints) -> tuple[Floats, Flags]:
        """Move the paddle."""
        self._paddle_E = np.clip(self._paddle_E + action_E - 1, 0, 4)
        self._row_E += 1
        is_over_E = self._row_E == 6
        reward_E = np.where(is_over_E, np.where(self._ball_E == self._paddle_E, 1.0, -1.0), 0.0)
        number = int(is_over_E.sum())
        self._row_E[is_over_E], self._paddle_E[is_over_E] = 0, 2
        self._ball_E[is_over_E] = self._rng.integers(0, 5, number)
        return reward_E, is_over_E


@final
class Digits:
    """A bandit with context: name the digit in an image. Its solution has an entropy near 0."""

    size, actions, worst, best = 64, 10, 0.1, 0.85

    def __init__(self, copies: int, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        train = digits.build(val_fraction=0.0).train
        images, labels = train.batch(torch.arange(len(train)))  # type: ignore[attr-defined, arg-type]  # data in memory
        self._images, self._labels = images.numpy().reshape(len(images), -1), labels.numpy()
        self._copies = copies
        self._draw()

    def _draw(self) -> None:
        self._shown_E = self._rng.integers(0, len(self._labels), self._copies)

    def observe(self) -> Floats:
        """Return an image for each copy."""
        return np.asarray(self._images[self._shown_E])

    def step(self, action_E: Ints) -> tuple[Floats, Flags]:
        """Name a digit."""
        reward_E = (self._labels[self._shown_E] == action_E).astype(np.float64)
        self._draw()
        return reward_E, np.ones(self._copies, np.bool_)
