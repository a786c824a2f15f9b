"""Data from real processes that the scripts of this set share: sounds, shapes in noise, a cart with a pole."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def plucked_strings(clips: int, samples: int = 512, rate: int = 8000, seed: int = 3) -> tuple[Tensor, Tensor]:
    """Return strings that are plucked and fade, and the same sounds in white noise, both (clips, 1, samples)."""
    generator = torch.Generator().manual_seed(seed)
    t = torch.arange(samples) / rate
    pitch = 150 * 4 ** torch.rand(clips, 1, generator=generator)
    sound = torch.zeros(clips, samples)
    for harmonic in range(1, 6):
        phase = 2 * math.pi * torch.rand(clips, 1, generator=generator)
        sound += torch.sin(2 * math.pi * harmonic * pitch * t + phase) * torch.exp(-8 * harmonic * t) / harmonic
    sound = 0.5 * sound + 1e-3 * torch.randn(clips, samples, generator=generator)  # and the hiss of the recorder
    noise = 0.3 * torch.randn(clips, samples, generator=generator)
    return sound[:, None], (sound + noise)[:, None]


def blobs(images: int, size: int = 24, seed: int = 4) -> tuple[Tensor, Tensor]:
    """Return noisy images with two bright ellipses each, and the masks of the ellipses, with one channel each."""
    generator = torch.Generator().manual_seed(seed)
    places = torch.arange(size).float()
    masks = torch.zeros(images, size, size)
    for _ in range(2):
        x, y = size * (0.15 + 0.7 * torch.rand(2, images, 1, 1, generator=generator))
        a, b = 1.5 + 2.5 * torch.rand(2, images, 1, 1, generator=generator)
        inside = ((places[None, :, None] - x) / a) ** 2 + ((places[None, None, :] - y) / b) ** 2 < 1
        masks = torch.maximum(masks, inside.float())
    noise = torch.randn(images, size, size, generator=generator)
    return (masks + 0.6 * noise)[:, None], masks[:, None]


class PolesOnCarts:
    """Several carts, each with a pole that falls if the cart is not pushed well: Barto, Sutton and Anderson 1983."""

    def __init__(self, carts: int, seed: int = 6) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.state = self._start(carts)
        self.age = torch.zeros(carts)

    def _start(self, carts: int) -> Tensor:
        return 0.1 * torch.rand(carts, 4, generator=self.generator) - 0.05

    def push(self, action: Tensor) -> Tensor:
        """Push each cart to the left (0) or to the right (1) for 20 ms; return which poles fell; they start again."""
        _, speed, angle, turn = self.state.unbind(1)
        force = 20.0 * action - 10.0
        pull = (force + 0.05 * turn**2 * angle.sin()) / 1.1
        bend = (9.8 * angle.sin() - angle.cos() * pull) / (0.5 * (4 / 3 - 0.1 * angle.cos() ** 2 / 1.1))
        push = pull - 0.05 * bend * angle.cos() / 1.1
        change = torch.stack([speed, push, turn, bend], 1)
        self.state = self.state + 0.02 * change
        self.age += 1
        fell = (self.state[:, 0].abs() > 2.4) | (self.state[:, 2].abs() > 0.21) | (self.age >= 200)
        self.state = torch.where(fell[:, None], self._start(len(fell)), self.state)
        self.age[fell] = 0
        return fell


def communities(nodes: int, groups: int = 4, noise: float = 2.0, seed: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Return features, groups and links of a random graph whose nodes know their own group better.

    Returns:
        Noisy features of shape (nodes, 12), the group of each node, and the symmetric matrix of links with a diagonal.
    """
    generator = torch.Generator().manual_seed(seed)
    group = torch.arange(nodes) % groups
    likely = torch.where(group[:, None] == group[None, :], 0.10, 0.01)
    links = (torch.rand(nodes, nodes, generator=generator) < likely).float().triu(1)
    typical = torch.randn(groups, 12, generator=generator)
    x = typical[group] + noise * torch.randn(nodes, 12, generator=generator)
    return x, group, links + links.T + torch.eye(nodes)
