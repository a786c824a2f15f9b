"""Text, series, attention, mixed precision, parameter-efficient tuning. All of these runs are fine."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from scripts.fault_zoo.cases.healthy_data import GPT, characters, digits, pretrained_gpt, sentences, shuffled, windows
from scripts.fault_zoo.protocol import Attach, case


@case(
    source="nanoGPT recipe: tied weights, warmup, cosine, clip 1.0, AdamW(0.9, 0.95)",
    tags=("gpt", "pre-ln", "tied", "warmup", "clipping"),
)
def gpt_warmup_cosine_clip(attach: Attach) -> None:
    """Small GPT on characters: one weight is both the embedding and the output layer; rate warms up from near zero and
    decays to a tenth.
    """
    torch.manual_seed(0)
    text, vocabulary = characters()
    model = GPT(vocabulary)
    decay = [p for p in model.parameters() if p.ndim >= 2]
    optimizer = torch.optim.AdamW(
        [
            {"params": decay, "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=3e-3,
        betas=(0.9, 0.95),
    )
    total, warm = 260, 30
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda s: (s + 1) / warm if s < warm else 0.1 + 0.45 * (1 + math.cos(math.pi * (s - warm) / (total - warm))),
    )
    monitor = attach(model, optimizer)
    for _step in range(total):
        x, y = windows(text, 16, 48)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        monitor.step(loss, batch=x)
    assert loss.item() < 1.2, loss.item()


@case(source="PyTorch AMP recipe with GradScaler; initial scale 2**16", tags=("amp", "fp16", "scaler", "skipped-steps"))
def fp16_scaler_initial_skips(attach: Attach) -> None:
    """Half precision with a GradScaler: the first updates overflow and are skipped while the scale finds its level.
    Normal.
    """
    torch.manual_seed(2)
    x, y, test_x, test_y = digits()
    x, test_x = x.flatten(1), test_x.flatten(1)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18, growth_interval=150)
    loss_fn = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, scaler=scaler, loss_fn=loss_fn)
    loader = shuffled(len(x), 96, seed=2)
    skipped = 0
    for _ in range(300):
        idx = next(loader)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = loss_fn(model(x[idx]), y[idx])
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped += scaler.get_scale() < before
        monitor.step(loss, batch=x[idx])
    assert 1 <= skipped <= 12, skipped
    assert (model(test_x).argmax(1) == test_y).float().mean() > 0.93


@case(source="sorting with a pre-LN encoder", tags=("pre-ln", "transformer"))
def pre_ln_transformer_sort(attach: Attach) -> None:
    """Pre-LN encoder sorts numbers; plateaus on the way are part of how attention learns this."""
    torch.manual_seed(6)
    embed, position = nn.Embedding(16, 64), nn.Embedding(16, 64)
    layer = nn.TransformerEncoderLayer(64, 4, 128, 0.0, "gelu", batch_first=True, norm_first=True)
    model = nn.ModuleDict(
        {
            "embed": embed,
            "position": position,
            "encoder": nn.TransformerEncoder(layer, 3, nn.LayerNorm(64), enable_nested_tensor=False),
            "out": nn.Linear(64, 16),
        }
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=260, pct_start=0.15)
    monitor = attach(model, optimizer)
    for _ in range(260):
        x = torch.randint(0, 16, (32, 16))
        h = model["embed"](x) + model["position"](torch.arange(16))
        loss = F.cross_entropy(model["out"](model["encoder"](h)).flatten(0, 1), x.sort(1).values.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        monitor.step(loss, batch=x)
    assert loss.item() < 0.5, loss.item()


class CharLSTM(nn.Module):
    def __init__(self, vocabulary: int, width: int = 96) -> None:
        super().__init__()
        self.embed, self.lstm, self.out = (
            nn.Embedding(vocabulary, 32),
            nn.LSTM(32, width, 2, batch_first=True),
            nn.Linear(width, vocabulary),
        )
        for name, p in self.lstm.named_parameters():
            if "bias_ih" in name:
                nn.init.zeros_(p)
                p.data[width : 2 * width] = 1.0

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        h, state = self.lstm(self.embed(x), state)
        return self.out(h), state


@case(source="character RNN with truncated BPTT and clipping", tags=("lstm", "clipping", "stateful"))
def lstm_truncated_bptt_clipped(attach: Attach) -> None:
    """Stateful LSTM language model: the hidden state is carried over and detached; gradients are clipped at 0.5 in most
    steps.
    """
    torch.manual_seed(7)
    text, vocabulary = characters(seed=7)
    streams = text[: len(text) // 16 * 16].view(16, -1)
    model = CharLSTM(vocabulary)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    monitor = attach(model, optimizer)
    state, at = None, 0
    for _ in range(220):
        if at + 33 > streams.shape[1]:
            state, at = None, 0
        x, y = streams[:, at : at + 32], streams[:, at + 1 : at + 33]
        at += 32
        logits, state = model(x, state)
        state = tuple(s.detach() for s in state)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        monitor.step(loss, batch=x)
    assert loss.item() < 1.2, loss.item()


@case(source="BERT masked-token objective", tags=("mlm", "transformer", "rare-tokens"))
def masked_language_model(attach: Attach) -> None:
    """Only the masked tokens carry loss; rare words are absent from most batches; the output layer is over the whole
    vocabulary.
    """
    torch.manual_seed(10)
    words = [s.rstrip(".").split() for s in sentences(5000, seed=10)]
    vocabulary = {w: i + 2 for i, w in enumerate(sorted({w for s in words for w in s}))}
    width = 12
    data = torch.tensor([[vocabulary[w] for w in s][:width] + [0] * (width - len(s)) for s in words])
    size = len(vocabulary) + 2

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.position = nn.Embedding(size, 64, padding_idx=0), nn.Embedding(width, 64)
            layer = nn.TransformerEncoderLayer(64, 4, 160, 0.1, "gelu", batch_first=True, norm_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(64), enable_nested_tensor=False)
            self.head = nn.Linear(64, size)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(
                self.encoder(self.embed(x) + self.position(torch.arange(width)), src_key_padding_mask=x == 0)
            )

    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.05, 1.0, 30)
    loss_fn = nn.CrossEntropyLoss(ignore_index=-100)
    monitor = attach(model, optimizer, loss_fn=loss_fn)
    loader, history = shuffled(len(data), 64, seed=10), []
    for _ in range(240):
        x = data[next(loader)]
        chosen = (torch.rand(x.shape) < 0.2) & (x > 0)
        y = torch.where(chosen, x, -100)
        masked = torch.where(chosen, 1, x)
        loss = loss_fn(model(masked).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        history.append(loss.item())
        monitor.step(loss, batch=masked)
    assert np.mean(history[-30:]) < 1.8, np.mean(history[-30:])


class LoRALinear(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 4, alpha: int = 8) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.A = nn.Parameter(torch.randn(rank, base.in_features) / math.sqrt(base.in_features))
        self.B = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scale = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scale * (x @ self.A.T) @ self.B.T


@case(
    source="LoRA, Hu et al. 2021: B starts at zero, the base is frozen",
    tags=("lora", "frozen", "zero-init", "transfer"),
)
def lora_finetuning(attach: Attach) -> None:
    """Low-rank adapters on a frozen GPT: at step 0 B is zero, so A has exactly zero gradient; everything else is frozen
    on purpose.
    """
    model, text, vocabulary = pretrained_gpt(12, dim=48, context=32)
    torch.manual_seed(120)
    model.requires_grad_(False)
    blocks: Any = model.blocks
    for block in blocks:
        block.attn.qkv = LoRALinear(block.attn.qkv)
        block.mlp[0] = LoRALinear(block.mlp[0])
    text = torch.tensor([(int(c) * 7 + 3) % vocabulary for c in text])  # a simple cipher of the same language
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    monitor = attach(model, optimizer)
    history = []
    for _ in range(180):
        x, y = windows(text, 12, 32)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        history.append(loss.item())
        monitor.step(loss, batch=x)
    assert np.mean(history[-20:]) < 0.75 * np.mean(history[:3]), (history[:3], history[-3:])


@case(
    source="CTC speech and OCR recipes: the blank phase at the start",
    tags=("ctc", "rnn", "slow-start", "clipping"),
    tolerate=("loss-plateau",),
)
def ctc_blank_phase(attach: Attach) -> None:
    """CTC first learns to say blank everywhere and stays there for a while before the labels appear. Typical of CTC."""
    torch.manual_seed(16)
    prototypes = torch.randn(11, 12)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(12, 64, 3, padding=1)
            self.rnn = nn.GRU(64, 64, batch_first=True, bidirectional=True)
            self.out = nn.Linear(128, 11)

        def forward(self, x: Tensor) -> Tensor:
            h = F.relu(self.conv(x.transpose(1, 2))).transpose(1, 2)
            return self.out(self.rnn(h)[0]).log_softmax(-1)

    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loss_fn = nn.CTCLoss(zero_infinity=True)
    monitor = attach(model, optimizer, loss_fn=loss_fn)
    for _ in range(260):
        labels = torch.randint(1, 11, (24, 6))
        frames = prototypes[labels.repeat_interleave(5, 1)] + 0.6 * torch.randn(24, 30, 12)
        log_p = model(frames).transpose(0, 1)
        loss = loss_fn(log_p, labels, torch.full((24,), 30), torch.full((24,), 6))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        monitor.step(loss, batch=frames)
    assert loss.item() < 0.3, loss.item()


class MaskedScores(nn.Module):
    def forward(self, q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        return (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).masked_fill(mask, float("-inf"))


class OwnAttention(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.scores, self.softmax = MaskedScores(), nn.Softmax(-1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.o(self.softmax(self.scores(self.q(x), self.k(x), mask)) @ self.v(x))


@case(
    source="attention written by hand: masked_fill(mask, -inf) before the softmax",
    tags=("attention", "mask", "natural-inf"),
)
def attention_mask_minus_infinity(attach: Attach) -> None:
    """The score module's output holds -inf at masked places, as every hand-written attention does; the softmax turns it
    into zero.
    """
    torch.manual_seed(19)

    class Model(nn.Module):
        def __init__(self, dim: int = 64) -> None:
            super().__init__()
            self.embed, self.position = nn.Embedding(12, dim), nn.Embedding(20, dim)
            self.attention = nn.ModuleList(OwnAttention(dim) for _ in range(2))
            self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
            self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
            self.out = nn.Linear(dim, 12)

        def forward(self, x: Tensor) -> Tensor:
            mask = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
            h = self.embed(x) + self.position(torch.arange(x.shape[1]))
            for norm, attention in zip(self.norms, self.attention, strict=False):
                h = h + attention(norm(h), mask)
            return self.out(h + self.mlp(h))

    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4)
    loss_fn = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=loss_fn)
    for _ in range(300):
        half = torch.randint(0, 12, (32, 10))
        x = torch.cat([half, half.flip(1)], 1)  # the second half mirrors the first
        loss = loss_fn(model(x[:, :-1])[:, 9:].flatten(0, 1), x[:, 10:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        monitor.step(loss, batch=x)
    assert loss.item() < 0.5, loss.item()
