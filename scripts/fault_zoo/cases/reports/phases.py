"""Training, validation, and what happens between the two."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.reports.material import accuracy, characters, digits, indices, windows
from scripts.fault_zoo.protocol import Attach, case

# --------------------------------------------------------------------------------- statistics that are never updated


def train_untracked(attach: Attach, *, repaired: bool) -> float:
    """Return the accuracy on test digits."""
    torch.manual_seed(0)
    x, y, test_x, test_y = digits(raw=True)
    momentum = 0.1 if repaired else 0.0
    model = nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 12, 3, padding=1, bias=False),
        nn.BatchNorm2d(12, momentum=momentum),
        nn.ReLU(),
        nn.Conv2d(12, 24, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(24, momentum=momentum),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(384, 10),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    monitor = attach(model, optimizer)
    chosen = indices(len(x), 64)
    for step in range(300):
        i = next(chosen)
        loss = F.cross_entropy(model(x[i]), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 25 == 24:
            model.eval()
            with torch.no_grad():
                val_loss = F.cross_entropy(model(test_x), test_y).item()
            model.train()
            monitor.step(loss, batch=x[i], val_loss=val_loss)
        else:
            monitor.step(loss, batch=x[i])
    return accuracy(model, test_x, test_y)


@case(
    fault="train-eval-mismatch",
    layers=("2", "5"),
    onset=24,
    tolerate=("overfitting",),
    source="https://github.com/takerum/vat_tf/issues/6",
    tags=("batch-norm", "digits"),
)
def statistics_without_update(attach: Attach) -> None:
    """The running statistics of the normalization are never updated, so that evaluation takes a mean of 0 and a
    variance of 1 for values in the hundreds. Reported in https://github.com/takerum/vat_tf/issues/6.
    """
    train_untracked(attach, repaired=False)


@case(
    source="the repaired twin of `statistics_without_update`: the statistics follow the batches",
    tags=("batch-norm", "digits"),
)
def statistics_with_update(attach: Attach) -> None:
    """Raw pixels go through batch normalization; the first validation comes while its statistics still move."""
    assert train_untracked(attach, repaired=True) > 0.95


# ------------------------------------------------------------------------------ evaluation mode after the validation


def train_left_in_eval(attach: Attach, *, repaired: bool) -> float:
    """Return the accuracy on test digits."""
    torch.manual_seed(0)
    x, y, test_x, test_y = digits()
    x, y = x[:240], y[:240]
    layers: list[nn.Module] = []
    for depth in range(6):
        layers += [nn.Linear(64 if depth == 0 else 96, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Dropout(0.2)]
    model = nn.Sequential(*layers, nn.Linear(96, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    monitor = attach(model, optimizer)
    chosen = indices(len(x), 24)
    model.train()
    for step in range(400):
        i = next(chosen)
        loss = F.cross_entropy(model(x[i]), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            model.eval()
            with torch.no_grad():
                val_loss = F.cross_entropy(model(test_x), test_y).item()
            if repaired:
                model.train()
            monitor.step(loss, batch=x[i], val_loss=val_loss)
        else:
            monitor.step(loss, batch=x[i])
    return accuracy(model, test_x, test_y)


@case(
    fault="train-eval-mismatch",
    onset=10,
    tolerate=(
        "overfitting",
        "learning-rate-too-high",
        "exploding-gradient",
        "gradient-spike",
        "dead-relu",
        "loss-plateau",
    ),
    source="https://github.com/huggingface/lerobot/issues/3668",
    tags=("batch-norm", "dropout", "digits"),
)
def evaluation_mode_for_the_rest(attach: Attach) -> None:
    """The validation switches to evaluation mode and does not switch back: from then on dropout is off and the
    statistics of the normalization stay as in the first steps. Reported in
    https://github.com/huggingface/lerobot/issues/3668.
    """
    train_left_in_eval(attach, repaired=False)


@case(
    source="the repaired twin of `evaluation_mode_for_the_rest`: training mode comes back",
    tags=("batch-norm", "dropout", "digits"),
)
def evaluation_mode_only_for_validation(attach: Attach) -> None:
    """A small data set, much dropout and batch normalization; the mode changes every ten steps."""
    assert train_left_in_eval(attach, repaired=True) > 0.85


# ------------------------------------------------------------------------------------------------ too little text


class Reader(nn.Module):
    """Characters, one recurrent layer, the next character."""

    def __init__(self, vocabulary: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 32)
        self.gru = nn.GRU(32, hidden, batch_first=True)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(self.gru(self.dropout(self.embed(x)))[0]))


def train_little_text(attach: Attach, *, repaired: bool) -> float:
    """Return the last validation loss."""
    torch.manual_seed(0)
    tokens, vocabulary = characters(60_000)
    train, val = tokens[: 50_000 if repaired else 1500], tokens[50_000:]
    model = Reader(vocabulary, 96, 0.1 if repaired else 0.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    monitor = attach(model, optimizer)
    generator = torch.Generator().manual_seed(1)
    val_x, val_y = windows(val, 20, 60, torch.Generator().manual_seed(2))
    val_loss = 0.0
    for step in range(220):
        x, y = windows(train, 20, 16, generator)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 19:
            model.eval()
            with torch.no_grad():
                val_loss = F.cross_entropy(model(val_x).flatten(0, 1), val_y.flatten()).item()
            model.train()
            monitor.step(loss, batch=x, val_loss=val_loss)
        else:
            monitor.step(loss, batch=x)
    return val_loss


@case(
    fault="overfitting",
    onset=60,
    source="https://github.com/codetiger/ThiruvalluvarGPT/issues/4",
    tags=("text", "gru"),
)
def too_little_text(attach: Attach) -> None:
    """The text has 1500 characters and the model 50,000 parameters: the validation loss rises after 100 steps.
    Reported in https://github.com/codetiger/ThiruvalluvarGPT/issues/4.
    """
    train_little_text(attach, repaired=False)
