"""Language models and text classifiers, on the help topics of Python."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.faulty_data import batches, setup
from scripts.fault_zoo.cases.forums.worlds import excerpts, letters, lines
from scripts.fault_zoo.protocol import Attach, case


class SelfAttention(nn.Module):
    """Causal attention, written out."""

    def __init__(self, dim: int, heads: int, scaled: bool) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(dim, dim) for _ in range(3))
        self.out = nn.Linear(dim, dim)
        self.factor = math.sqrt(dim // heads) if scaled else 1.0

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        q, k, v = (
            layer(x).view(batch, length, self.heads, -1).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        scores = q @ k.transpose(-2, -1) / self.factor
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(batch, length, dim))


class Layer(nn.Module):
    def __init__(self, dim: int, heads: int, scaled: bool, ahead: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = SelfAttention(dim, heads, scaled)
        self.ahead = ahead

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.ahead(self.norm2(x))


def perceptron(dim: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))


class LetterModel(nn.Module):
    """A small decoder that predicts the next letter."""

    def __init__(self, vocab: int, dim: int, *, heads: int = 4, depth: int = 2, scaled: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.place = nn.Parameter(0.02 * torch.randn(64, dim))
        self.layers = nn.ModuleList(Layer(dim, heads, scaled, perceptron(dim)) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.place[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def train_letters(attach: Attach, model: LetterModel, ids: Tensor, *, lr: float, steps: int = 180) -> float:
    """Train with Adam and return the mean loss of the last 20 steps."""
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(steps):
        text, following = excerpts(ids, 32, 8, generator)
        loss = criterion(model(text).flatten(0, 1), following.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=text)
        losses.append(loss.item())
    return sum(losses[-20:]) / 20


@case(
    fault="poor-initialization",
    also=("saturated-activation", "exploding-gradient"),
    layers=("embed", "head"),
    onset=0,
    tolerate=("layer-imbalance",),
    source=(
        "https://github.com/Modalities/modalities/pull/456 (a tied head needs 1/sqrt(dim), not 1), "
        "https://github.com/huggingface/transformers/pull/26441, https://github.com/pytorch/pytorch/issues/3121"
    ),
    tags=("transformer",),
)
def lm_tied_unit_embedding(attach: Attach) -> None:
    """The head shares the embedding's weights, which nn.Embedding draws with standard deviation 1; the first loss is
    about 20 times that of guessing.
    """
    setup(21)
    ids, vocab = letters()
    model = LetterModel(vocab, 96)
    model.head.weight = model.embed.weight
    train_letters(attach, model, ids, lr=1e-3)


@case(source="https://github.com/Modalities/modalities/pull/456", tags=("transformer", "twin"))
def lm_tied_unit_embedding_fixed(attach: Attach) -> None:
    """The shared weights are drawn with a standard deviation of 0.02."""
    setup(21)
    ids, vocab = letters()
    model = LetterModel(vocab, 96)
    nn.init.normal_(model.embed.weight, std=0.02)
    model.head.weight = model.embed.weight
    assert train_letters(attach, model, ids, lr=1e-3) < 2.95


@case(
    fault="attention-collapse",
    also=("saturated-activation", "poor-initialization"),
    layers=("layers",),
    onset=0,
    source="https://github.com/PAIR-code/tiny-transformers/issues/71, https://github.com/delzac/cntkx/issues/10",
    tags=("transformer",),
)
def lm_attention_not_scaled(attach: Attach) -> None:
    """The scores are not divided by the root of the head's size; with Xavier weights their standard deviation is 11."""
    setup(22)
    ids, vocab = letters()
    model = LetterModel(vocab, 128, heads=1, scaled=False)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.xavier_uniform_(parameter)
    train_letters(attach, model, ids, lr=1e-3, steps=150)


class LineEncoder(nn.Module):
    """A line's words attend to each other; padding is masked."""

    def __init__(self, vocab: int, classes: int, dim: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim, padding_idx=0)
        self.attention = nn.MultiheadAttention(dim, 4, batch_first=True)
        self.norm = nn.LayerNorm(dim)
        self.classify = nn.Linear(dim, classes)

    def forward(self, ids: Tensor) -> Tensor:
        padding = ids == 0
        words = self.embed(ids)
        seen, _ = self.attention(words, words, words, key_padding_mask=padding)
        words = self.norm(words + seen).masked_fill(padding[:, :, None], 0.0)
        return self.classify(words.sum(1) / (~padding).sum(1, keepdim=True).clamp(min=1))


@case(
    fault="non-finite",
    also=("unstable-formula",),
    onset=1,
    source="https://github.com/pytorch/pytorch/issues/40932, https://github.com/pytorch/pytorch/issues/41508",
    tags=("attention",),
)
def topic_line_all_padding(attach: Attach) -> None:
    """A line without a known word is all padding; its attention is a softmax over nothing, whose gradient is NaN even
    where its output is masked.
    """
    setup(24)
    ids, labels = lines()
    model = LineEncoder(int(ids.max()) + 1, int(labels.max()) + 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for words, topic in batches(ids, labels, size=16, steps=250):
        loss = criterion(model(words), topic)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=words)


class Experts(nn.Module):
    """Each letter goes to one of eight experts (Fedus et al. 2022)."""

    def __init__(self, dim: int, count: int = 8) -> None:
        super().__init__()
        self.router = nn.Linear(dim, count)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)) for _ in range(count)
        )
        self.balance = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        share = self.router(flat).softmax(1)
        weight, chosen = share.max(1)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            mine = (chosen == i).nonzero().squeeze(1)
            if len(mine):
                out = out.index_add(0, mine, weight[mine, None] * expert(flat[mine]))
        load = F.one_hot(chosen, len(self.experts)).float().mean(0)
        self.balance = len(self.experts) * (load * share.mean(0)).sum()
        return out.view_as(x)


@case(source="Fedus et al. 2022, Switch Transformer, sec. 2", tags=("transformer", "odd"))
def lm_switch_experts(attach: Attach) -> None:
    """Top-1 routing: an expert that no letter of a batch goes to has no gradient in that step."""
    setup(25)
    ids, vocab = letters()
    model = LetterModel(vocab, 64, depth=2)
    mixture = Experts(64)
    model.layers[1].ahead = mixture
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor = attach(model, optimizer)
    generator = torch.Generator().manual_seed(0)
    for _ in range(250):
        text, following = excerpts(ids, 24, 8, generator)
        error = F.cross_entropy(model(text).flatten(0, 1), following.flatten())
        loss = error + 0.02 * mixture.balance
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=text)
    assert error < 2.9


class Reverser(nn.Module):
    def __init__(self, dim: int = 96) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, dim)
        self.gru = nn.GRU(dim, dim, batch_first=True)
        self.name = nn.Linear(dim, 10)

    def forward(self, digits: Tensor) -> Tensor:
        blank = torch.full_like(digits, 10)
        states, _ = self.gru(self.embed(torch.cat([digits, blank], 1)))
        return self.name(states[:, digits.shape[1] :])


@case(source="Bengio et al. 2009, Curriculum learning; Zaremba & Sutskever 2014", tags=("curriculum", "odd"))
def reverse_longer_and_longer(attach: Attach) -> None:
    """Numbers to be reversed get longer by plan, and the loss jumps at each change."""
    setup(26)
    model = Reverser()
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    monitor = attach(model, optimizer)
    for length, steps in ((2, 100), (3, 120), (4, 180)):
        for _ in range(steps):
            number = torch.randint(0, 10, (128, length))
            loss = F.cross_entropy(model(number).flatten(0, 1), number.flip(1).flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            monitor.step(loss, batch=number)
    number = torch.randint(0, 10, (500, 4))
    with torch.no_grad():
        assert (model(number).argmax(2) == number.flip(1)).float().mean() > 0.8
