"""A small adversarial training that is fine: a generator against a discriminator, two optimizers, one monitor."""

from __future__ import annotations

import random
from typing import Any

import torch
from tasks import draw, images
from torch import nn
from torch.nn import functional

import gradwatch
from gradwatch.history.store import History


def adversarial(rng: random.Random, size: int, steps: int, watched: dict[str, Any]) -> tuple[History, str]:
    """Train a generator of digits, hinge or logistic loss, and return the history and what was drawn.

    Args:
        rng: Source of chance.
        size: Samples per batch.
        steps: Updates of each player.
        watched: Further arguments of `watch`.
    """
    x, width, is_hinge = 2 * images()[0].flatten(1) - 1, rng.choice([64, 128]), rng.random() < 0.5
    generator = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 64), nn.Tanh())
    critic = nn.Sequential(nn.Linear(64, width), nn.LeakyReLU(0.2), nn.Linear(width, 1))
    rate = 10 ** rng.uniform(-3.7, -3)
    makes = torch.optim.Adam(generator.parameters(), rate, betas=(0.5, 0.999))
    judges = torch.optim.Adam(critic.parameters(), rate * rng.choice([1, 2]), betas=(0.5, 0.999))
    monitor = gradwatch.watch({"generator": generator, "critic": critic}, [makes, judges], **watched)
    for _ in range(steps):
        (real,) = draw(size, x)
        made = generator(torch.randn(len(real), 16))
        truth, lie = critic(real), critic(made.detach())
        if is_hinge:
            judged = (torch.relu(1 - truth) + torch.relu(1 + lie)).mean()
        else:
            judged = (functional.softplus(-truth) + functional.softplus(lie)).mean()
        judges.zero_grad()
        judged.backward()
        judges.step()
        fooled = -critic(made).mean() if is_hinge else functional.softplus(-critic(made)).mean()
        makes.zero_grad()
        fooled.backward()
        makes.step()
        monitor.step(fooled + judged.detach(), batch=real)
    monitor.close()
    return monitor.history, f"{'hinge' if is_hinge else 'logistic'} Adam {rate:.2g} width {width}"
