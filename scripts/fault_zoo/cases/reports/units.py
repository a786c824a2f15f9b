"""Units and experts that stop to take part."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.reports.material import indices, table
from scripts.fault_zoo.protocol import Attach, case

# ------------------------------------------------------------------------------------------- a ReLU as the last layer


class MobilityNet(nn.Module):
    """An LSTM reads a peptide, a head predicts its mobility."""

    def __init__(self, last: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.lstm = nn.LSTM(16, 32, batch_first=True)
        self.head = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1), last)

    def forward(self, peptide: Tensor) -> Tensor:
        states, _ = self.lstm(self.embed(peptide))
        return self.head(states[:, -1]).squeeze(1)


def train_mobility(attach: Attach, *, repaired: bool) -> float:
    """Return the error on test peptides, as a fraction of the variance of their targets."""
    torch.manual_seed(0)
    peptides = torch.randint(20, (1200, 8))
    mass = torch.rand(20) * 2
    mobility = mass[peptides].mean(1) + 0.2 * (mass[peptides[:, -1]] - 1)
    model = MobilityNet(nn.Identity() if repaired else nn.ReLU())
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    monitor = attach(model, optimizer, loss_fn=F.mse_loss)
    chosen = indices(1000, 64)
    for _ in range(400):
        i = next(chosen)
        loss = F.mse_loss(model(peptides[i]), mobility[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=peptides[i])
    with torch.no_grad():
        return (F.mse_loss(model(peptides[1000:]), mobility[1000:]) / mobility[1000:].var()).item()


@case(
    fault="dead-relu",
    also=("no-gradient", "dead-layer"),
    layers=("head",),
    onset=0,
    tolerate=("loss-plateau", "vanishing-gradient"),
    source="https://github.com/ProteomicsML/ProteomicsML/pull/203",
    tags=("lstm", "regression"),
)
def mobility_from_a_last_relu(attach: Attach) -> None:
    """The regression ends in a ReLU. It starts below zero for every peptide, so that no gradient comes back, and the
    model returns 0 for ever. Reported in https://github.com/ProteomicsML/ProteomicsML/pull/203.
    """
    train_mobility(attach, repaired=False)


# ------------------------------------------------------------------------------------ a record in the wrong unit


def train_with_wrong_unit(attach: Attach, *, repaired: bool) -> float:
    """Return the absolute error on test data, as a fraction of that of the median."""
    torch.manual_seed(0)
    x, y, test_x, test_y = table("diabetes")
    mean, deviation = y.mean(), y.std()
    y, test_y = (y - mean) / deviation, (test_y - mean) / deviation
    model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)
    loss_fn = nn.SmoothL1Loss()
    monitor = attach(model, optimizer, loss_fn=loss_fn)
    chosen = indices(len(x), 32)
    for step in range(400):
        i = next(chosen)
        rows = x[i].clone()
        if step == 160:
            rows[3] *= 1e5  # exported in another unit
        if repaired:
            rows = rows.clamp(-5, 5)
        loss = loss_fn(model(rows).squeeze(1), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=rows)
    with torch.no_grad():
        error = (model(test_x).squeeze(1) - test_y).abs().mean()
    return (error / (test_y - y.median()).abs().mean()).item()


@case(
    fault="dead-relu",
    also=("gradient-spike", "rising-sparsity"),
    onset=160,
    tolerate=("exploding-gradient", "loss-plateau", "no-gradient", "dead-layer"),
    source="https://github.com/Liam0205/liam0205.github.io/issues/262",
    tags=("tabular",),
)
def record_in_wrong_unit(attach: Attach) -> None:
    """One record has values far outside the usual range. Its gradient moves the weights so far that the units never
    fire again for usual records. Reported in https://github.com/Liam0205/liam0205.github.io/issues/262, after a paper
    of Airbnb.
    """
    train_with_wrong_unit(attach, repaired=False)


@case(source="the repaired twin of `record_in_wrong_unit`: values are clipped to five deviations", tags=("tabular",))
def record_in_wrong_unit_clipped(attach: Attach) -> None:
    """A record has absurd values at one step; the script clips them."""
    assert train_with_wrong_unit(attach, repaired=True) < 0.85


# ---------------------------------------------------------------------------------------- a router without balance


class RoutedExperts(nn.Module):
    """Each input goes to one of eight linear experts."""

    def __init__(self, dim: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(dim, experts)
        self.experts = nn.ModuleList(nn.Linear(dim, 1) for _ in range(experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        probabilities = self.router(x).softmax(1)
        gate, choice = probabilities.max(1)
        out = torch.zeros(len(x))
        for e, expert in enumerate(self.experts):
            mine = (choice == e).nonzero().squeeze(1)
            out = out.index_add(0, mine, gate[mine] * expert(x[mine]).squeeze(1))
        share = F.one_hot(choice, len(self.experts)).float().mean(0)
        return out, len(self.experts) * (share * probabilities.mean(0)).sum()


def train_routed(attach: Attach, *, repaired: bool) -> float:
    """Return the error on new points, as a fraction of the variance of their targets."""
    torch.manual_seed(4)
    centres, slopes, offsets = 2 * torch.randn(8, 16), torch.randn(8, 16), torch.randn(8)
    model = RoutedExperts(16, 8)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    monitor = attach(model, optimizer)

    def draw(n: int) -> tuple[Tensor, Tensor]:
        which, noise = torch.randint(8, (n,)), torch.randn(n, 16)
        return 5 + centres[which] + 0.7 * noise, (slopes[which] * noise).sum(1) / 4 + offsets[which]

    for _ in range(500):
        x, y = draw(256)
        out, imbalance = model(x)
        loss = F.mse_loss(out, y) + (0.3 * imbalance if repaired else 0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x)
    x, y = draw(2000)
    with torch.no_grad():
        out, _ = model(x)
        return (F.mse_loss(out, y) / y.var()).item()


@case(
    fault="dead-layer",
    also=("no-gradient",),
    layers=("experts.1", "experts.2", "experts.4", "experts.5", "experts.6"),
    onset=10,
    tolerate=("loss-plateau", "rising-sparsity", "gradient-spike"),
    source="https://github.com/pytorch/torchtitan/issues/1246",
    tags=("experts",),
)
def experts_without_balance(attach: Attach) -> None:
    """The router takes the best of eight experts and has no loss that balances them. Three experts get all the
    inputs; the other ones get no gradient. Reported in https://github.com/pytorch/torchtitan/issues/1246.
    """
    train_routed(attach, repaired=False)
