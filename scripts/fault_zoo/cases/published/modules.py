"""What is inside the network: experts, lazy layers, quantised activations, attention with dropout."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.published.data import setup
from scripts.fault_zoo.cases.published.parts import text, windows
from scripts.fault_zoo.protocol import Attach, case


class FlashAttention(nn.Module):
    def __init__(self, width: int, heads: int, dropout_p: float, keep: bool) -> None:
        super().__init__()
        self.heads, self.dropout_p, self.keep = heads, dropout_p, keep
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, w = x.shape
        q, k, v = (u.view(b, t, self.heads, -1).transpose(1, 2) for u in self.qkv(x).chunk(3, -1))
        p = self.dropout_p
        if not self.training:
            p = 0.0
            if not self.keep:
                self.dropout_p = p
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(b, t, w))


class Decoder(nn.Module):
    def __init__(self, vocab: int, keep: bool, width: int = 64, depth: int = 2, length: int = 32) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(vocab, width), nn.Parameter(0.02 * torch.randn(length, width))
        self.attn = nn.ModuleList(FlashAttention(width, 4, 0.3, keep) for _ in range(depth))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(depth)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * depth + 1))
        self.head = nn.Linear(width, vocab)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position[: ids.shape[1]]
        for i, (attn, mlp) in enumerate(zip(self.attn, self.mlp, strict=False)):
            x = x + attn(self.norms[2 * i](x))
            x = x + mlp(self.norms[2 * i + 1](x))
        return self.head(self.norms[-1](x))


def _attention(attach: Attach, keep: bool) -> None:
    setup(515)
    ids, vocab = text()
    train, held_out = ids[:40000], ids[40000:]
    model = Decoder(vocab, keep)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(515)
    x_val, y_val = windows(held_out, 32, 64, torch.Generator().manual_seed(516))
    monitor = attach(model, optimizer, loss_fn=F.cross_entropy)
    model.train()
    for step in range(300):
        x, y = windows(train, 32, 16, generator)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 60 < 59:
            monitor.step(loss, batch=x)
            continue
        model.eval()
        with torch.no_grad():
            val_loss = F.cross_entropy(model(x_val).flatten(0, 1), y_val.flatten())
        model.train()
        monitor.step(loss, batch=x, val_loss=val_loss)


@case(
    fault="train-eval-mismatch",
    layers=("attn",),
    onset=60,
    tolerate=("overfitting",),
    tags=("mid-run", "subtle"),
    source=(
        "NVIDIA/Megatron-LM#411: FlashSelfAttention sets dropout_p to 0 in its first forward pass in eval mode, for "
        "good"
    ),
)
def flash_attention_dropout(attach: Attach) -> None:
    """A character model with dropout inside the fused attention, validated every sixty updates."""
    _attention(attach, keep=False)


@case(fault=None, source="NVIDIA/Megatron-LM#411, after the change")
def flash_attention_dropout_fixed(attach: Attach) -> None:
    """The same with a local variable for the dropout."""
    _attention(attach, keep=True)
