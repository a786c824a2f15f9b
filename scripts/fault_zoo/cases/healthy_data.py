"""Data and a few networks that the healthy scripts share. Registers no case."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.checkpoint import checkpoint

torch.set_num_threads(1)


def digits(size: int = 8, holdout: int = 360, centre: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """sklearn's 1797 digits as images: (train x, train y, test x, test y)."""
    bundle = load_digits()
    x = torch.tensor(bundle.images, dtype=torch.float32).unsqueeze(1) / 16.0
    y = torch.tensor(bundle.target, dtype=torch.long)
    if size != 8:
        x = torch.nn.functional.interpolate(x, size=(size, size), mode="bilinear", align_corners=False)
    if centre:
        x = (x - 0.305) / 0.376
    order = torch.from_numpy(np.random.RandomState(7).permutation(len(x)))
    x, y = x[order], y[order]
    return x[holdout:], y[holdout:], x[:holdout], y[:holdout]


def textures(n: int, size: int = 16, classes: int = 6, noise: float = 0.5, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Coloured gratings; the class is the orientation."""
    rng = np.random.RandomState(seed)
    label = rng.randint(0, classes, n)
    angle = np.pi * (label + rng.normal(0, 0.12, n)) / classes
    frequency, phase = rng.uniform(1.5, 3.0, n), rng.uniform(0, 2 * np.pi, n)
    yy, xx = np.meshgrid(np.linspace(-1, 1, size), np.linspace(-1, 1, size), indexing="ij")
    wave = np.cos(
        np.pi * frequency[:, None, None] * (np.cos(angle)[:, None, None] * xx + np.sin(angle)[:, None, None] * yy)
        + phase[:, None, None]
    )
    colour = rng.uniform(0.3, 1.0, (n, 3, 1, 1))
    image = colour * wave[:, None] + noise * rng.normal(size=(n, 3, size, size))
    return torch.tensor(image, dtype=torch.float32), torch.tensor(label, dtype=torch.long)


NOUNS = [
    "fox",
    "dog",
    "cat",
    "bird",
    "tree",
    "river",
    "stone",
    "child",
    "queen",
    "sailor",
    "garden",
    "letter",
    "window",
    "clock",
    "storm",
]
VERBS = ["sees", "likes", "finds", "follows", "paints", "carries", "hears", "watches", "forgets", "builds"]
ADJECTIVES = ["red", "quiet", "old", "brave", "small", "golden", "cold", "happy"]


def sentences(count: int, seed: int = 0) -> list[str]:
    rng = np.random.RandomState(seed)
    out = []
    for _ in range(count):

        def phrase() -> list[str]:
            words = ["the" if rng.rand() < 0.7 else "a"]
            if rng.rand() < 0.5:
                words.append(ADJECTIVES[min(int(rng.exponential(2)), len(ADJECTIVES) - 1)])
            words.append(NOUNS[min(int(rng.exponential(4)), len(NOUNS) - 1)])
            return words

        words = [*phrase(), VERBS[min(int(rng.exponential(3)), len(VERBS) - 1)], *phrase()]
        if rng.rand() < 0.3:
            words += ["and", VERBS[min(int(rng.exponential(3)), len(VERBS) - 1)], *phrase()]
        out.append(" ".join(words) + ".")
    return out


def characters(count: int = 4000, seed: int = 0) -> tuple[Tensor, int]:
    """A made-up text as a tensor of character ids, and the size of its alphabet."""
    text = " ".join(sentences(count, seed))
    alphabet = sorted(set(text))
    index = {c: i for i, c in enumerate(alphabet)}
    return torch.tensor([index[c] for c in text], dtype=torch.long), len(alphabet)


def shuffled(n: int, batch: int, seed: int = 0) -> Iterator[Tensor]:
    """Index batches, a new permutation every epoch, without end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(n, generator=generator)
        for start in range(0, n - batch + 1, batch):
            yield order[start : start + batch]


def accuracy(model: Any, x: Any, y: Any) -> Any:
    model.eval()
    with torch.no_grad():
        result = (model(x).argmax(1) == y).float().mean().item()
    model.train()
    return result


class BasicBlock(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outer)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inner != outer:
            self.shortcut = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self, width: int = 8, classes: int = 6, channels: int = 3, zero_init: bool = True) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(channels, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.layer1 = nn.Sequential(BasicBlock(width, width), BasicBlock(width, width))
        self.layer2 = nn.Sequential(BasicBlock(width, 2 * width, 2), BasicBlock(2 * width, 2 * width))
        self.layer3 = nn.Sequential(BasicBlock(2 * width, 4 * width, 2), BasicBlock(4 * width, 4 * width))
        self.fc = nn.Linear(4 * width, classes)
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")
        if zero_init:
            for m in self.modules():
                if isinstance(m, BasicBlock):
                    nn.init.zeros_(m.bn2.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(self.stem(x))))
        return self.fc(x.mean((2, 3)))


def pretrained_backbone(seed: int, steps: int = 100, width: int = 16) -> nn.Sequential:
    """A CNN trained on half of the classes, to fine-tune from."""
    torch.manual_seed(seed)
    x, y, _, _ = digits(size=16)
    keep = y < 5
    x, y = x[keep], y[keep]
    backbone = nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(2 * width, 2 * width, 3, padding=1),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
    )
    head = nn.Linear(8 * width, 5)
    optimizer = torch.optim.Adam([*backbone.parameters(), *head.parameters()], lr=2e-3)
    loader = shuffled(len(x), 64, seed=seed)
    for _ in range(steps):
        idx = next(loader)
        optimizer.zero_grad()
        F.cross_entropy(head(backbone(x[idx])), y[idx]).backward()
        optimizer.step()
    return backbone


class Classifier(nn.Module):
    def __init__(self, backbone: nn.Sequential, width: int, classes: int = 10) -> None:
        super().__init__()
        self.backbone = backbone
        self.fc = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.backbone(x))


def ring(n: int) -> Tensor:
    angle = torch.randint(0, 8, (n,)) * (2 * math.pi / 8)
    return torch.stack([angle.cos(), angle.sin()], 1) * 2 + 0.08 * torch.randn(n, 2)


def cartpole_step(state: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """The classic cart and pole, vectorised; returns the new state and whether it fell."""
    x, v, a, w = state.unbind(1)
    force = torch.where(action == 1, 10.0, -10.0)
    sin, cos = a.sin(), a.cos()
    temp = (force + 0.05 * w**2 * sin) / 1.1
    acceleration = (9.8 * sin - cos * temp) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
    xa = temp - 0.05 * acceleration * cos / 1.1
    state = torch.stack([x + 0.02 * v, v + 0.02 * xa, a + 0.02 * w, w + 0.02 * acceleration], 1)
    return state, (state[:, 0].abs() > 2.4) | (state[:, 2].abs() > 0.2095)


class CausalAttention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.ln1, self.attn = nn.LayerNorm(dim), CausalAttention(dim, heads)
        self.ln2, self.mlp = (
            nn.LayerNorm(dim),
            nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)),
        )

    def forward(self, x: Tensor) -> Tensor | None:
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(
        self,
        vocabulary: int,
        dim: int = 64,
        depth: int = 2,
        heads: int = 4,
        context: int = 48,
        tie: bool = True,
        checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, dim), nn.Embedding(context, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.ln_f = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        self.checkpointing = checkpointing
        for name, p in self.named_parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * depth) if "proj" in name or "mlp.2" in name else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)
        if tie:
            self.head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing and self.training else block(x)
        return self.head(self.ln_f(x))


def windows(text: Tensor, batch: int, context: int) -> tuple[Tensor, Tensor]:
    start = torch.randint(0, len(text) - context - 1, (batch,))
    chunk = torch.stack([text[s : s + context + 1] for s in start])
    return chunk[:, :-1], chunk[:, 1:]


def pretrained_gpt(seed: int, steps: int = 80, **options: Any) -> tuple[GPT, Tensor, int]:
    torch.manual_seed(seed)
    text, vocabulary = characters(seed=seed)
    model = GPT(vocabulary, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for _ in range(steps):
        x, y = windows(text, 12, 32)
        optimizer.zero_grad()
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model, text, vocabulary
