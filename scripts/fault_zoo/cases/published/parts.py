"""What the scripts of this set share: text that comes with Python, batches, a small causal transformer. No faults."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@lru_cache(None)
def text(size: int = 60000) -> tuple[Tensor, int]:
    """(ids of the first `size` characters of Python's reference topics in lower case, vocabulary size)"""
    from pydoc_data import topics

    letters = "abcdefghijklmnopqrstuvwxyz .,;:()'\n"
    raw = "\n".join(topics.topics[k] for k in sorted(topics.topics)).lower()
    raw = " ".join("".join(c if c in letters else " " for c in raw).split(" "))
    while "   " in raw:
        raw = raw.replace("   ", " ")
    return torch.tensor([letters.index(c) for c in raw[:size]]), len(letters)


def windows(ids: Tensor, length: int, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A random batch of (inputs, next ids)."""
    at = torch.randint(0, len(ids) - length - 1, (size,), generator=generator)[:, None] + torch.arange(length)
    return ids[at], ids[at + 1]


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        b, t, w = x.shape
        q, k, v = (f(x).view(b, t, self.heads, -1).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.o_proj(y.transpose(1, 2).reshape(b, t, w))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool = True) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, heads, causal)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self, vocab: int, width: int = 48, depth: int = 2, length: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02 if isinstance(module, nn.Embedding) else width**-0.5 / 2)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def pretrained(model: GPT, ids: Tensor, length: int, steps: int, seed: int, lr: float = 3e-3, size: int = 16) -> GPT:
    """The model after so many updates on next characters: the checkpoint that a fine-tuning starts from."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 20)
        x, y = windows(ids, length, size, generator)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    optimizer.zero_grad()
    return model


class Adapter(nn.Module):
    """A frozen linear layer and a trained low-rank term beside it."""

    def __init__(self, base: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.base, self.scale = base, scale
        self.lora_A = nn.Parameter(torch.randn(rank, base.in_features) / rank)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank))
        for p in base.parameters():
            p.requires_grad = False

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scale * F.linear(F.linear(x, self.lora_A), self.lora_B)


def with_adapters(
    model: GPT, rank: int, scale: float, targets: tuple[str, str, str] = ("q_proj", "v_proj", "o_proj")
) -> GPT:
    """The model frozen, with adapters on the projections named."""
    for p in model.parameters():
        p.requires_grad = False
    for module in list(model.modules()):
        for name in targets:
            if isinstance(getattr(module, name, None), nn.Linear):
                setattr(module, name, Adapter(getattr(module, name), rank, scale))
    return model
