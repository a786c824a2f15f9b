"""Transformers and recurrent networks: language models on the help topics of Python, and a reader of rows."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from scripts.fault_zoo.cases.mailing.material import digits, draws, excerpts, letters, mean_of_last
from scripts.fault_zoo.protocol import Attach, case


class Adapted(nn.Module):
    """A linear layer with a change of low rank (LoRA), which is zero at first."""

    def __init__(self, base: nn.Module, rank: int = 8) -> None:
        super().__init__()
        assert isinstance(base, nn.Linear)
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / math.sqrt(base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2 * (x @ self.down.T @ self.up.T)


class Block(nn.Module):
    """Causal attention and a perceptron, each with a normalization before it."""

    def __init__(self, dim: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.query, self.key, self.value, self.merge = (nn.Linear(dim, dim) for _ in range(4))
        self.ahead = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        seen = self.norm1(x)
        q, k, v = (
            layer(seen).view(batch, length, self.heads, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.merge(mixed.transpose(1, 2).reshape(batch, length, dim))
        return x + self.ahead(self.norm2(x))


class Reader(nn.Module):
    """A small decoder without a head."""

    def __init__(self, embed: nn.Module, dim: int = 48, depth: int = 2) -> None:
        super().__init__()
        self.embed = embed
        self.place = nn.Parameter(0.02 * torch.randn(64, dim))
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor, reentrant: bool | None = None) -> Tensor:
        x = self.embed(x) + self.place[: x.shape[1]]
        for block in self.blocks:
            x = block(x) if reentrant is None else checkpoint(block, x, use_reentrant=reentrant)
        return self.norm(x)


class LetterModel(nn.Module):
    """Predict letters. As in transformers, the model shifts the labels itself."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.reader = Reader(nn.Embedding(vocab, 48))
        self.head = nn.Linear(48, vocab)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.reader(ids))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


# ------------------------------------------------------------------------------------------------ shifted two times


def train_shifted(attach: Attach, *, repaired: bool) -> float:
    """Return the loss of the next letter on 64 excerpts."""
    torch.manual_seed(201)
    ids, vocab = letters()
    model = LetterModel(vocab)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    monitor = attach(model, optimizer)
    generator = torch.Generator().manual_seed(0)
    for _ in range(220):
        text = excerpts(ids, length=33, count=16, generator=generator)
        loss = model(text, text) if repaired else model(text[:, :-1], text[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=text)
    text = excerpts(ids, length=33, count=64, generator=generator)
    with torch.no_grad():
        return model(text, text).item()


@case(
    fault="loss-plateau",
    onset=0,
    source="https://github.com/huggingface/transformers/pull/44642",
    tags=("transformer", "labels"),
)
def labels_shifted_two_times(attach: Attach) -> None:
    """The data set shifts the labels by one letter and so does the model, which learns to predict the letter after the
    next one. Reported again and again: https://github.com/huggingface/transformers/pull/44642,
    https://github.com/huggingface/transformers/pull/37830, https://github.com/allenai/open-instruct/pull/1549. No kind
    fits a target that is the wrong one; the loss stays higher than it should, so a plateau comes nearest.
    """
    train_shifted(attach, repaired=False)


# --------------------------------------------------------------------------------- checkpoints that cut the gradient


class RowModel(nn.Module):
    """Read a digit row by row and name it."""

    def __init__(self) -> None:
        super().__init__()
        self.reader = Reader(nn.Linear(8, 48))
        self.head = nn.Linear(48, 10)

    def forward(self, x: Tensor, reentrant: bool | None = None) -> Tensor:
        return self.head(self.reader(x, reentrant).mean(1))

    def adapt(self) -> None:
        """Freeze the reader, put adapters next to its layers, and make a new head."""
        self.reader.requires_grad_(False)
        for block in self.reader.blocks.children():
            assert isinstance(block, Block)
            for owner, name in ((block, "query"), (block, "value"), (block.ahead, "0"), (block.ahead, "2")):
                setattr(owner, name, Adapted(owner.get_submodule(name)))
        self.head = nn.Linear(48, 10)


def train_adapters(attach: Attach, *, repaired: bool) -> float:
    """Learn upright digits first, unwatched, then digits on their side. Return the mean loss of the last 20 steps."""
    torch.manual_seed(202)
    x, y, _, _ = digits()
    model = RowModel()
    first = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for i in draws(len(x), size=32, steps=150, seed=9):
        first.zero_grad()
        F.cross_entropy(model(x[i, 0]), y[i]).backward()
        first.step()
    model.adapt()
    x = x.rot90(1, (2, 3))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    losses = []
    for i in draws(len(x), size=32, steps=250):
        loss = criterion(model(x[i, 0], reentrant=not repaired), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
        losses.append(loss.item())
    return mean_of_last(losses)


@case(
    fault="no-gradient",
    also=("not-optimized", "dead-layer"),
    layers=("reader.blocks",),
    onset=0,
    source="https://github.com/huggingface/transformers/issues/26221",
    tags=("lora", "checkpointing", "fine-tuning"),
)
def checkpoints_above_frozen_embedding(attach: Attach) -> None:
    """The embedding is frozen and the blocks are checkpointed the reentrant way, which makes no graph if no input needs
    a gradient: the adapters in the blocks stay as they were, and only the head learns. Reported in
    https://github.com/huggingface/transformers/issues/26221, https://github.com/huggingface/transformers/issues/21381
    and https://github.com/huggingface/peft/issues/1142.
    """
    train_adapters(attach, repaired=False)


@case(source="the repaired twin of `checkpoints_above_frozen_embedding`", tags=("lora", "checkpointing", "twin"))
def checkpoints_that_are_not_reentrant(attach: Attach) -> None:
    """The blocks are checkpointed with `use_reentrant=False`, and the adapters learn."""
    assert train_adapters(attach, repaired=True) < 0.3


# ----------------------------------------------------------------------------------------------- a text read in order


class Recurrent(nn.Module):
    def __init__(self, vocab: int, dim: int = 96) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, 32)
        self.gru = nn.GRU(32, dim, batch_first=True)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        out, state = self.gru(self.embed(ids), state)
        return self.head(out), state


@case(source="Mikolov et al. 2010; Merity et al. 2018: text is read in order, the state is kept", tags=("rnn", "odd"))
def text_read_in_order(attach: Attach) -> None:
    """Nothing is shuffled: 16 places of the text are read in order, and the state of one step is the start of the next,
    behind a detach().
    """
    torch.manual_seed(203)
    ids, vocab = letters()
    streams = ids[: len(ids) // 16 * 16].view(16, -1)
    model = Recurrent(vocab)
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    state: Tensor | None = None
    losses = []
    for step in range(250):
        text = streams[:, 32 * step : 32 * step + 33]
        logits, state = model(text[:, :-1], None if state is None else state.detach())
        loss = criterion(logits.flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        monitor.step(loss, batch=text)
        losses.append(loss.item())
    assert mean_of_last(losses) < 2.6
