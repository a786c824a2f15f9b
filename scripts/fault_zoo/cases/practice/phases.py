"""Validation that does something else than training, or keeps too much."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.practice.processes import communities
from scripts.fault_zoo.cases.reports.material import characters, digits, indices, windows
from scripts.fault_zoo.protocol import Attach, case

# ---------------------------------------------------------------------------------------- dropout that never ends


class GraphClassifier(nn.Module):
    """Two graph convolutions with dropout before each of them."""

    def __init__(self, features: int, classes: int, *, always_drops: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(features, 48)
        self.outer = nn.Linear(48, classes)
        self.always_drops = always_drops

    def forward(self, x: Tensor, mean: Tensor) -> Tensor:
        drops = self.always_drops or self.training
        h = F.relu(self.inner(mean @ F.dropout(x, 0.6, drops)))
        return self.outer(mean @ F.dropout(h, 0.6, drops))


def train_communities(attach: Attach, *, repaired: bool) -> float:
    """Return the accuracy on the nodes without a label."""
    torch.manual_seed(0)
    x, group, adjacency = communities(400, noise=5.0)
    mean = adjacency / adjacency.sum(1, keepdim=True)
    model = GraphClassifier(x.shape[1], 4, always_drops=not repaired)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)
    monitor = attach(model, optimizer)
    for step in range(300):
        labelled = torch.randperm(200)[:64]
        loss = F.cross_entropy(model(x, mean)[labelled], group[labelled])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            model.eval()
            with torch.no_grad():
                val_loss = F.cross_entropy(model(x, mean)[200:], group[200:]).item()
            model.train()
            monitor.step(loss, val_loss=val_loss)
        else:
            monitor.step(loss)
    model.eval()
    with torch.no_grad():
        return (model(x, mean)[200:].argmax(1) == group[200:]).float().mean().item()


@case(
    fault="train-eval-mismatch",
    onset=9,
    source="https://github.com/pytorch/pytorch/issues/26338",
    tags=("graph", "dropout"),
)
def dropout_in_evaluation(attach: Attach) -> None:
    """`F.dropout` is called without `training=self.training`, so that 60 % of the features are dropped in evaluation,
    too. Reported in https://github.com/pytorch/pytorch/issues/26338.
    """
    train_communities(attach, repaired=False)


@case(source="the repaired twin of `dropout_in_evaluation`: dropout ends with training", tags=("graph", "dropout"))
def dropout_only_in_training(attach: Attach) -> None:
    """So much dropout that the training loss stays above the validation loss."""
    assert train_communities(attach, repaired=True) > 0.85


# ------------------------------------------------------------------------------------ tastes that are learned by heart


class Tastes(nn.Module):
    """The rating is the product of a user and an item, and how much each of them differs from the mean."""

    def __init__(self, users: int, items: int, size: int) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(users, size), nn.Embedding(items, size)
        self.user_offset, self.item_offset = nn.Embedding(users, 1), nn.Embedding(items, 1)
        for table in (self.user, self.item):
            nn.init.normal_(table.weight, std=0.1)
        for table in (self.user_offset, self.item_offset):
            nn.init.zeros_(table.weight)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        product = (self.user(users) * self.item(items)).sum(1)
        return product + self.user_offset(users).squeeze(1) + self.item_offset(items).squeeze(1)


def train_tastes(attach: Attach, *, repaired: bool) -> float:
    """Return the last validation loss, as a fraction of the best one."""
    torch.manual_seed(0)
    users, items, count = 200, 120, 5000
    true = Tastes(users, items, 3)
    for table in true.parameters():
        nn.init.normal_(table, std=0.7)
    who, which = torch.randint(users, (count,)), torch.randint(items, (count,))
    with torch.no_grad():
        rating = true(who, which) + 1.5 * torch.randn(count)
    model = Tastes(users, items, 4 if repaired else 48)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2, weight_decay=1.0 if repaired else 0.0)
    monitor = attach(model, optimizer)
    chosen = indices(4000, 100)
    history = []
    for step in range(480):
        i = next(chosen)
        loss = F.mse_loss(model(who[i], which[i]), rating[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 19:
            with torch.no_grad():
                history.append(F.mse_loss(model(who[4000:], which[4000:]), rating[4000:]).item())
            monitor.step(loss, batch=torch.stack([who[i], which[i]]), val_loss=history[-1])
        else:
            monitor.step(loss, batch=torch.stack([who[i], which[i]]))
    return history[-1] / min(history)


@case(
    fault="overfitting",
    onset=160,
    source="https://github.com/tensorflow/recommenders/issues/252",
    tags=("recommender", "embedding"),
)
def tastes_by_heart(attach: Attach) -> None:
    """Users and items have 48 numbers each and 20 ratings per user, without weight decay: the loss falls and the
    validation loss rises. Reported in https://github.com/tensorflow/recommenders/issues/252.
    """
    train_tastes(attach, repaired=False)


# --------------------------------------------------------------------------------------------- validation with graphs


def train_validated(attach: Attach, *, repaired: bool) -> float:
    """Return how many autograd graphs the last validation held at its end."""
    torch.manual_seed(0)
    x, y, test_x, test_y = digits()
    model = nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(128, 10),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    monitor = attach(model, optimizer, loss_fn=F.cross_entropy)
    chosen = indices(len(x), 48)
    graphs = 0
    for step in range(200):
        i = next(chosen)
        loss = F.cross_entropy(model(x[i]), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 19:
            model.eval()
            with torch.set_grad_enabled(not repaired):
                losses = [
                    F.cross_entropy(model(part), labels)
                    for part, labels in zip(test_x.split(50), test_y.split(50), strict=True)
                ]
            model.train()
            graphs = sum(loss.grad_fn is not None for loss in losses)
            monitor.step(loss, batch=x[i], val_loss=sum(loss.item() for loss in losses) / len(losses))
        else:
            monitor.step(loss, batch=x[i])
    return graphs


@case(
    fault="evaluation-with-graph",
    onset=19,
    source="https://github.com/skorch-dev/skorch/issues/218",
    tags=("conv", "digits", "memory"),
)
def validation_with_graphs(attach: Attach) -> None:
    """The validation is in evaluation mode, but not under `no_grad`, and keeps the losses of nine batches with their
    graphs. Reported in https://github.com/skorch-dev/skorch/issues/218.
    """
    train_validated(attach, repaired=False)


# ---------------------------------------------------------------------------------------------- a sum with all graphs


class Reader(nn.Module):
    """Characters, one recurrent layer, the next character."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 24)
        self.gru = nn.GRU(24, 48, batch_first=True)
        self.head = nn.Linear(48, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.gru(self.embed(tokens))[0])


def train_summed(attach: Attach, *, repaired: bool) -> float:
    """Return the mean loss, or the length of the chain of graphs behind it."""
    torch.manual_seed(0)
    tokens, vocabulary = characters(30_000)
    model = Reader(vocabulary)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    monitor = attach(model, optimizer)
    generator = torch.Generator().manual_seed(1)
    running = torch.zeros(())
    for _ in range(200):
        x, y = windows(tokens, 24, 12, generator)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        running = running + (loss.detach() if repaired else loss) / 200
        monitor.step(loss, batch=x)
    depth, node = 0, running.grad_fn
    while node is not None and node.next_functions:
        depth, node = depth + 1, node.next_functions[0][0]
    return depth if depth else running.item()


@case(
    fault="graph-leak",
    also=("memory-growth",),
    onset=1,
    source="https://github.com/BatsResearch/labelmodels/issues/4",
    tags=("text", "gru", "memory"),
)
def mean_loss_with_all_graphs(attach: Attach) -> None:
    """The mean loss of an epoch is a sum of losses that keep their graphs, so that no graph is freed before the epoch
    ends. Reported in https://github.com/BatsResearch/labelmodels/issues/4.
    """
    train_summed(attach, repaired=False)


@case(
    source="the repaired twin of `mean_loss_with_all_graphs`: the losses are detached", tags=("text", "gru", "memory")
)
def mean_loss_without_graphs(attach: Attach) -> None:
    """A recurrent network reads text; the script adds up detached losses."""
    assert train_summed(attach, repaired=True) < 3.0


# ------------------------------------------------------------------------------------------- outputs that are collected


def train_collected(attach: Attach, *, repaired: bool) -> float:
    """Return how many bytes the script holds at the end."""
    torch.manual_seed(0)
    x, _, _, _ = digits()
    big = F.interpolate(x.view(-1, 1, 8, 8), size=(48, 48))
    model = nn.Sequential(nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.Conv2d(6, 1, 5, padding=2))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    monitor = attach(model, optimizer, loss_fn=F.mse_loss)
    chosen = indices(len(x), 8)
    outputs = []
    for _ in range(200):
        i = next(chosen)
        noisy = big[i] + 0.3 * torch.randn(len(i), 1, 48, 48)
        out = model(noisy)
        loss = F.mse_loss(out, big[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        entry = {"loss": loss.detach(), "noisy": noisy, "out": out.detach(), "channels": model[0](noisy).detach()}
        outputs.append({"loss": entry["loss"]} if repaired else entry)
        monitor.step(loss, batch=noisy)
    return sum(tensor.nbytes for entry in outputs for tensor in entry.values())


@case(
    fault="memory-growth",
    onset=20,
    source="https://github.com/Lightning-AI/pytorch-lightning/issues/1510",
    tags=("conv", "restoration", "memory"),
)
def outputs_of_an_epoch(attach: Attach) -> None:
    """The loop collects the detached outputs and channels of each step for a summary at the end of the epoch: 600 kB
    per step. Reported in https://github.com/Lightning-AI/pytorch-lightning/issues/1510.
    """
    train_collected(attach, repaired=False)
