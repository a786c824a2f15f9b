"""A small GPT: accumulation, clipping, a GradScaler and a cosine schedule by hand."""

import contextlib
import math

import torch
from torch import nn
from torch.nn import functional as F

max_iters, warmup_iters, learning_rate, min_lr = 24, 5, 1e-2, 1e-3
gradient_accumulation_steps, grad_clip, block_size, batch_size, vocab = 3, 1.0, 16, 8, 24


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.Linear(width, 3 * width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = self.attn(self.ln_1(x)).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(block_size, width)
        self.h = nn.ModuleList(Block(width) for _ in range(2))
        self.lm_head = nn.Linear(width, vocab, bias=False)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, vocab), targets.view(-1))


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


def main(watch, *, enabled, init_scale=2.0**10):
    torch.manual_seed(1337)
    data = torch.arange(4000).mul(7).remainder(vocab)

    def get_batch():
        ix = torch.randint(len(data) - block_size - 1, (batch_size,)).tolist()
        x = torch.stack([data[i : i + block_size] for i in ix])
        return x, torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])

    model = GPT()
    scaler = torch.amp.GradScaler("cpu", enabled=enabled, init_scale=init_scale, growth_interval=16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
    ctx = torch.autocast("cpu", torch.float16) if enabled else contextlib.nullcontext()
    losses = []
    with watch(model, optimizer, scaler=scaler) as monitor:
        for it in range(max_iters):
            for group in optimizer.param_groups:
                group["lr"] = get_lr(it)
            whole, batch = 0, []
            for _ in range(gradient_accumulation_steps):
                X, Y = get_batch()
                with ctx:
                    _, loss = model(X, Y)
                    loss = loss / gradient_accumulation_steps
                whole, batch = whole + loss, [*batch, (X, Y)]
                scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            monitor.step(whole, batch=batch)
            losses.append(loss.item() * gradient_accumulation_steps)
    return losses
