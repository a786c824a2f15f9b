"""Graphs and recommendations: a predictor left in training mode, neighbours not drawn, and a sign of a correction."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.mailing.material import draws
from scripts.fault_zoo.protocol import Attach, case


def towns(seed: int, *, count: int = 600, groups: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    """Return noisy features (N, 16), links (N, N) mostly within a group, and the group of each node."""
    generator = torch.Generator().manual_seed(seed)
    group = torch.randint(0, groups, (count,), generator=generator)
    features = torch.randn(groups, 16, generator=generator)[group] + 3 * torch.randn(count, 16, generator=generator)
    chance = torch.where(group[:, None] == group, 0.08, 0.004)
    links = (torch.rand(count, count, generator=generator) < chance).float().triu(1)
    return features, links + links.T, group


def normalized(links: Tensor) -> Tensor:
    """Return the adjacency with loops, divided by the roots of the degrees (Kipf and Welling 2017)."""
    looped = links + torch.eye(len(links))
    root = looped.sum(1).rsqrt()
    return root[:, None] * looped * root


class Encoder(nn.Module):
    """Two graph convolutions."""

    def __init__(self, out: int, width: int = 32) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, width), nn.Linear(width, out)

    def forward(self, x: Tensor, inner: Tensor, outer: Tensor) -> Tensor:
        return outer @ self.second(F.relu(inner @ self.first(x)))


# ------------------------------------------------------------------------------------ a predictor in training mode


@case(
    fault="train-eval-mismatch",
    layers=("predictor",),
    onset=19,
    source="https://github.com/snap-stanford/ogb/issues/359",
    tags=("graph", "links", "dropout"),
)
def predictor_left_in_training_mode(attach: Attach) -> None:
    """A graph network encodes nodes and a predictor scores pairs of them. The evaluation calls `eval()` for the encoder
    and forgets the predictor, whose dropout goes on.
    """
    torch.manual_seed(721)
    x, links, _ = towns(1)
    pairs = links.triu(1).nonzero()
    pairs = pairs[torch.randperm(len(pairs))]
    known, held = pairs[:-400], pairs[-400:]
    seen = torch.zeros_like(links)
    seen[known[:, 0], known[:, 1]] = 1
    near = normalized(seen + seen.T)
    encoder = Encoder(32)
    predictor = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 1))
    parts = nn.ModuleDict({"encoder": encoder, "predictor": predictor})
    optimizer = torch.optim.Adam(parts.parameters(), lr=5e-3)
    criterion = nn.BCEWithLogitsLoss()
    monitor = attach(parts, optimizer, loss_fn=criterion)

    def score(nodes: Tensor, pair: Tensor) -> Tensor:
        return predictor(nodes[pair[:, 0]] * nodes[pair[:, 1]]).squeeze(1)

    for step, i in enumerate(draws(len(known), size=128, steps=300)):
        encoder.train()
        predictor.train()
        nodes = encoder(x, near, near)
        scores = score(nodes, torch.cat([known[i], torch.randint(0, len(x), (128, 2))]))
        loss = criterion(scores, torch.cat([torch.ones(128), torch.zeros(128)]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        val_loss = None
        if step % 20 == 19:
            encoder.eval()
            with torch.no_grad():
                nodes = encoder(x, near, near)
                scores = score(nodes, torch.cat([held, torch.randint(0, len(x), (400, 2))]))
                val_loss = criterion(scores, torch.cat([torch.ones(400), torch.zeros(400)])).item()
        monitor.step(loss, batch=known[i], val_loss=val_loss)


# ------------------------------------------------------------------------------------ neighbours not drawn


def train_on_samples(attach: Attach, *, draws_among_neighbours: bool) -> float:
    """Return the mean training loss of the last 20 steps; each layer of the network sees 60 nodes that are drawn."""
    torch.manual_seed(722)
    x, links, group = towns(2)
    near = normalized(links)
    weight = (near**2).sum(0)
    model = Encoder(6)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    losses: list[float] = []
    for step, i in enumerate(draws(450, size=64, steps=250)):
        chances = (near[i] ** 2).sum(0) if draws_among_neighbours else weight
        count = 300 if draws_among_neighbours else 120
        outer = chances.multinomial(count, replacement=True)
        chances_of_inner = (near[outer] ** 2).sum(0) if draws_among_neighbours else weight
        inner = chances_of_inner.multinomial(count, replacement=True)
        to_batch = near[i][:, outer] * chances.sum() / (chances[outer] * count)
        to_outer = near[outer][:, inner] * chances_of_inner.sum() / (chances_of_inner[inner] * count)
        loss = criterion(model(x[inner], to_outer, to_batch), group[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        val_loss = None
        if step % 25 == 24:
            with torch.no_grad():
                val_loss = criterion(model(x, near, near)[450:], group[450:]).item()
        monitor.step(loss, batch=i, val_loss=val_loss)
    return sum(losses[-20:]) / 20


@case(
    fault="loss-plateau",
    also=("train-eval-mismatch", "no-gradient"),
    onset=24,
    source="https://github.com/matenure/FastGCN/issues/9",
    tags=("graph", "sampling"),
)
def neighbours_not_drawn(attach: Attach) -> None:
    """Each layer of a graph network sees 120 nodes that are drawn for themselves. Most nodes of a batch have no
    neighbour among them, get zeros, and teach nothing, and the training accuracy stays far below the validation.
    """
    train_on_samples(attach, draws_among_neighbours=False)


@case(source="the repaired twin of `neighbours_not_drawn`", tags=("graph", "sampling", "twin"))
def neighbours_drawn(attach: Attach) -> None:
    """The nodes are drawn among the neighbours of the batch, and the training loss falls below 0.8."""
    assert train_on_samples(attach, draws_among_neighbours=True) < 0.8


# ------------------------------------------------------------------------------------ a sign of a correction


def train_towers(attach: Attach, *, sign: int) -> float:
    """Return the share of readers whose next book is among the 20 best of 300."""
    torch.manual_seed(723)
    generator = torch.Generator().manual_seed(1)
    readers = F.normalize(torch.randn(800, 8, generator=generator), dim=1)
    books = F.normalize(torch.randn(300, 8, generator=generator), dim=1)
    popular = -1.2 * torch.arange(1.0, 301).log()
    chances = (4 * readers @ books.T + popular).softmax(1)
    history = chances.multinomial(12, generator=generator)
    reader = torch.arange(800).repeat_interleave(10)
    read, following = history[:, :10].flatten(), history[:, 10:]
    share = torch.bincount(read, minlength=300).clamp(min=1) / len(read)
    features = readers + 0.2 * torch.randn(readers.shape, generator=generator)
    towers = nn.ModuleDict(
        {
            "reader": nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 16)),
            "book": nn.Embedding(300, 16),
        }
    )
    optimizer = torch.optim.Adam(towers.parameters(), lr=0.01)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(towers, optimizer, loss_fn=criterion)
    for i in draws(len(read), size=128, steps=400):
        scores = towers["reader"](features[reader[i]]) @ towers["book"](read[i]).T
        scores = scores + sign * share[read[i]].log()
        same = (read[i][:, None] == read[i]) & ~torch.eye(len(i), dtype=torch.bool)
        loss = criterion(scores.masked_fill(same, -1e4), torch.arange(len(i)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=read[i])
    with torch.no_grad():
        best = (towers["reader"](features) @ towers["book"].weight.T).topk(20).indices
    return (best[:, :, None] == following[:, None]).any(1).float().mean().item()


@case(
    fault="loss-plateau",
    onset=0,
    source="https://github.com/tensorflow/recommenders/issues/219",
    tags=("recommendation", "loss"),
)
def correction_with_the_wrong_sign(attach: Attach) -> None:
    """Two towers score readers and books, and the other books of the batch count as not read. The logarithm of how
    often a book is in a batch is added to its score, and should be subtracted. Rare books are recommended to everybody.
    """
    train_towers(attach, sign=1)


@case(source="the repaired twin of `correction_with_the_wrong_sign`", tags=("recommendation", "loss", "twin"))
def correction_with_the_right_sign(attach: Attach) -> None:
    """The logarithm is subtracted. The next book is among the best 20 for more than a third of the readers."""
    assert train_towers(attach, sign=-1) > 0.33
