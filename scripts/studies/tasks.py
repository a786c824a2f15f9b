"""Small healthy trainings by family: the tasks of `studies/false_alarms.py`. Everything is drawn from one seed."""

# B = samples of a batch, T = places of a sequence, N = samples, V = characters

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradwatch.data import digits, text

Loss = Callable[[], tuple[Tensor, Tensor]]
"""Draws a batch and returns its loss and its inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A model and what it learns.

    Args:
        model: The model.
        loss: Called once per micro-batch.
        validate: Returns a validation loss, or None where there is none.
        rate: Learning rate that suits Adam.
        sgd_rate: Learning rate that suits plain SGD; None where SGD does not suit.
        falls: Whether the loss says how much was learned.
        is_half_safe: Whether it may run under autocast.
    """

    model: nn.Module
    loss: Loss
    validate: Callable[[], Tensor] | None = None
    rate: float = 1e-3
    sgd_rate: float | None = 0.05
    falls: bool = True
    is_half_safe: bool = True


Family = Callable[[random.Random, int], Task]
"""Draws a task, given a source of chance and the number of samples per batch."""

ACTIVATIONS = (nn.ReLU, nn.ReLU, nn.GELU, nn.Tanh, nn.SiLU, nn.LeakyReLU, nn.ELU)


@cache
def images() -> tuple[Tensor, Tensor]:
    """Return the digits as images of shape (N, 1, 8, 8) from 0 to 1, and their labels."""
    train = digits.build(val_fraction=0.0).train
    return train.batch(torch.arange(len(train)))  # type: ignore[attr-defined, arg-type, no-any-return]


@cache
def characters() -> tuple[Tensor, int]:
    """Return 60,000 characters of English text as numbers, and how many different ones there are."""
    splits = text.build(context=1, stride=1)
    tokens = splits.train.windows[:60_000, 0].long()  # type: ignore[attr-defined]
    return tokens, splits.spec.outputs


def draw(size: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the same random rows of some tensors."""
    rows = torch.randint(len(tensors[0]), (min(size, len(tensors[0])),))
    return tuple(t[rows] for t in tensors)


def passages(size: int, length: int) -> tuple[Tensor, Tensor]:
    """Return random passages of the text and the same one place further on, each of shape (B, T)."""
    tokens, _ = characters()
    starts = torch.randint(len(tokens) - length - 1, (size, 1)) + torch.arange(length)
    return tokens[starts], tokens[starts + 1]


class Residual(nn.Module):
    """A part whose input is added to its output."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        """Return the input plus what the part makes of it."""
        return x + self.part(x)  # type: ignore[no-any-return]


def perceptron(rng: random.Random, inputs: int, outputs: int) -> nn.Module:
    """Return fully connected layers of random depth, width, activation, normalisation and initialisation."""
    kind, width, depth = rng.choice(ACTIVATIONS), rng.choice([32, 64, 128, 256]), rng.randint(1, 6)
    norm = rng.choice([None, None, nn.BatchNorm1d, nn.LayerNorm])
    is_residual, dropout = rng.random() < 0.3, rng.choice([0, 0, 0.1, 0.3])
    if kind is nn.Tanh and norm is None and not is_residual:
        depth = min(depth, 4)  # deeper ones need help
    layers: list[nn.Module] = [nn.Linear(inputs, width), kind()]
    for _ in range(depth - 1):
        parts = [nn.Linear(width, width), *([norm(width)] if norm else []), kind(), nn.Dropout(dropout)]
        layers.append(Residual(nn.Sequential(*parts)) if is_residual else nn.Sequential(*parts))
    model = nn.Sequential(*layers, nn.Linear(width, outputs))
    if rng.random() < 0.3:
        for module in model.modules():
            if isinstance(module, nn.Linear):
                (nn.init.kaiming_normal_ if kind is nn.ReLU else nn.init.xavier_normal_)(module.weight)
                nn.init.zeros_(module.bias)
    return model


def classifier(rng: random.Random, size: int) -> Task:
    """A perceptron on digits, with raw or standardised pixels and sometimes smoothed labels."""
    x, y = images()
    x = x.flatten(1)
    if rng.random() < 0.5:
        x = (x - x.mean(0)) / (x.std(0) + 1e-3)
    model, criterion = perceptron(rng, 64, 10), nn.CrossEntropyLoss(label_smoothing=rng.choice([0.0, 0.0, 0.1]))

    def loss() -> tuple[Tensor, Tensor]:
        a, b = draw(size, x[:1500], y[:1500])
        return criterion(model(a), b), a

    return Task(model=model, loss=loss, validate=lambda: functional.cross_entropy(model(x[1500:]), y[1500:]))


def regression(rng: random.Random, size: int) -> Task:
    """A perceptron on a synthetic function of a few standardised features, with noise."""
    features = rng.choice([4, 8, 16])
    x = torch.randn(4000, features)
    y = torch.sin(x[:, 0]) + x[:, 1] * x[:, 2] + 0.5 * x[:, 3] + rng.choice([0.1, 0.5]) * torch.randn(4000)
    model, criterion = perceptron(rng, features, 1), rng.choice([nn.MSELoss(), nn.SmoothL1Loss(), nn.L1Loss()])

    def loss() -> tuple[Tensor, Tensor]:
        a, b = draw(size, x[:3600], y[:3600])
        return criterion(model(a)[:, 0], b), a

    return Task(model=model, loss=loss, validate=lambda: criterion(model(x[3600:])[:, 0], y[3600:]), sgd_rate=0.02)


def linear(rng: random.Random, size: int) -> Task:
    """Logistic regression on digits, sometimes with weights that start at zero."""
    x, y = images()
    x, model = x.flatten(1), nn.Linear(64, 10)
    if rng.random() < 0.5:
        nn.init.zeros_(model.weight)

    def loss() -> tuple[Tensor, Tensor]:
        a, b = draw(size, x, y)
        return functional.cross_entropy(model(a), b), a

    return Task(model=model, loss=loss, rate=3e-3, sgd_rate=0.3)


def convolutions(rng: random.Random, size: int) -> Task:
    """A convolutional network on digits, with or without batch normalisation, plain or residual."""
    x, y = images()
    width, kind, has_norm, is_residual = (
        rng.choice([8, 16]),
        rng.choice(ACTIVATIONS),
        *(rng.random() < 0.6 for _ in "ab"),
    )

    def block(a: int, b: int) -> nn.Module:
        norm = [nn.BatchNorm2d(b)] if has_norm else []
        part = nn.Sequential(nn.Conv2d(a, b, 3, padding=1, bias=not has_norm), *norm, kind())
        return Residual(part) if is_residual and a == b else part

    head = [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(8 * width, 10)]
    body = [block(1, width), block(width, width), nn.MaxPool2d(2), block(width, 2 * width), block(2 * width, 2 * width)]
    model = nn.Sequential(*body[: rng.choice([4, 5])], *head)

    def loss() -> tuple[Tensor, Tensor]:
        a, b = draw(min(size, 64), x[:1500], y[:1500])
        return functional.cross_entropy(model(a), b), a

    return Task(model=model, loss=loss, validate=lambda: functional.cross_entropy(model(x[1500:]), y[1500:]))


class Block(nn.Module):
    """A transformer block, normalised before or after."""

    def __init__(self, width: int, *, is_pre: bool) -> None:
        super().__init__()
        self.is_pre = is_pre
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Return the sequence, of shape (B, T, width)."""
        h = self.norm1(x) if self.is_pre else x
        x = x + self.attention(h, h, h, attn_mask=mask, need_weights=False)[0]
        if self.is_pre:
            return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]
        x = self.norm1(x)
        return self.norm2(x + self.mlp(x))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """Embeddings, blocks and a head, whose weight may be that of the embedding."""

    def __init__(
        self, vocabulary: int, width: int, blocks: int, *, is_pre: bool, is_tied: bool, is_causal: bool
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width, is_pre=is_pre) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.places.weight, std=0.02)
        if is_tied:
            self.head.weight = self.tokens.weight
        self.is_causal = is_causal

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of shape (B, T, V)."""
        length = x.shape[1]
        mask = torch.triu(torch.full((length, length), float("-inf")), 1) if self.is_causal else None
        h = self.tokens(x) + self.places.weight[:length]
        for block in self.blocks:
            h = block(h, mask)
        return self.head(self.norm(h))  # type: ignore[no-any-return]


def language_model(rng: random.Random, size: int) -> Task:
    """A small transformer that predicts characters, or fills in masked ones."""
    _, vocabulary = characters()
    is_causal = rng.random() < 0.8
    model = Transformer(
        vocabulary + 1,
        rng.choice([32, 64]),
        rng.choice([1, 2, 4]),
        is_pre=rng.random() < 0.7,
        is_tied=rng.random() < 0.4,
        is_causal=is_causal,
    )

    def loss() -> tuple[Tensor, Tensor]:
        x, y = passages(min(size, 16), 24)
        if not is_causal:
            y = x
            x = torch.where(torch.rand(x.shape) < 0.2, vocabulary, x)
        return functional.cross_entropy(model(x).flatten(0, 1), y.flatten()), x

    return Task(model=model, loss=loss, sgd_rate=None)


class Recurrent(nn.Module):
    """Embeddings, a recurrent network and a head."""

    def __init__(self, vocabulary: int, width: int, kind: type[nn.RNNBase], layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, 32)
        self.body = kind(32, width, layers, batch_first=True)  # type: ignore[arg-type]
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of shape (B, T, V)."""
        return self.head(self.body(self.tokens(x))[0])  # type: ignore[no-any-return]


def recurrent(rng: random.Random, size: int) -> Task:
    """An LSTM or GRU that predicts characters."""
    _, vocabulary = characters()
    model = Recurrent(vocabulary, 64, rng.choice([nn.LSTM, nn.GRU]), rng.choice([1, 2]))

    def loss() -> tuple[Tensor, Tensor]:
        x, y = passages(min(size, 16), rng.choice([16, 32]))
        return functional.cross_entropy(model(x).flatten(0, 1), y.flatten()), x

    return Task(model=model, loss=loss, rate=3e-3, sgd_rate=None, is_half_safe=False)  # no LSTM in float16 on a CPU
