"""Graphs: molecules of one batch that are pooled into one, and a network that is the limit of many layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.mailing.material import digits, draws
from scripts.fault_zoo.protocol import Attach, case

# ------------------------------------------------------------------------------------ all molecules are one

Molecule = tuple[Tensor, Tensor, float]


def molecules(count: int, seed: int) -> list[Molecule]:
    """Return trees of 5 to 12 atoms of three kinds: kinds one-hot, both directions of the bonds, and a boiling point.

    The boiling point depends on how many atoms of a kind there are and on which kinds are bound to each other.
    """
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        size = int(torch.randint(5, 13, (1,), generator=generator))
        kind = torch.randint(0, 3, (size,), generator=generator)
        parent = torch.tensor([int(torch.randint(0, i, (1,), generator=generator)) for i in range(1, size)])
        child = torch.arange(1, size)
        bonds = torch.stack([torch.cat([parent, child]), torch.cat([child, parent])])
        polar = (kind[parent] != kind[child]).float().mean().item()
        point = 2 * (kind == 0).float().mean().item() - (kind == 2).float().mean().item() + 3 * polar
        found.append((F.one_hot(kind, 3).float(), bonds, point))
    return found


def collate(batch: list[Molecule]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return all atoms, all bonds, the molecule of each atom, and the boiling points."""
    counts = torch.tensor([len(atoms) for atoms, _, _ in batch])
    starts = counts.cumsum(0) - counts
    atoms = torch.cat([atoms for atoms, _, _ in batch])
    bonds = torch.cat([bonds + start for (_, bonds, _), start in zip(batch, starts, strict=True)], 1)
    molecule = torch.repeat_interleave(torch.arange(len(batch)), counts)
    return atoms, bonds, molecule, torch.tensor([[point] for _, _, point in batch])


def mean_pool(x: Tensor, molecule: Tensor | None = None) -> Tensor:
    """Return the mean over the atoms of each molecule; over all atoms if it is not known which are whose."""
    if molecule is None:
        return x.mean(0, keepdim=True)
    count = int(molecule.max()) + 1
    total = torch.zeros(count, x.shape[1]).index_add(0, molecule, x)
    return total / torch.bincount(molecule, minlength=count)[:, None]


class Convolution(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.own, self.others = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs, bias=False)

    def forward(self, x: Tensor, bonds: Tensor) -> Tensor:
        return self.own(x) + torch.zeros(len(x), self.own.out_features).index_add(0, bonds[1], self.others(x)[bonds[0]])


class MoleculeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = Convolution(3, 32), Convolution(32, 32)
        self.head = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, atoms: Tensor, bonds: Tensor, molecule: Tensor | None = None) -> Tensor:
        hidden = torch.relu(self.conv1(atoms, bonds))
        hidden = torch.relu(self.conv2(hidden, bonds))
        return self.head(mean_pool(hidden, molecule))


def train_molecules(attach: Attach, *, repaired: bool) -> float:
    """Return the squared error on new molecules, as a part of the variance."""
    torch.manual_seed(121)
    data = molecules(1200, seed=1)
    model = MoleculeNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    criterion = nn.MSELoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for i in draws(1200, size=32, steps=300):
        atoms, bonds, molecule, point = collate([data[j] for j in i.tolist()])
        predicted = model(atoms, bonds, molecule) if repaired else model(atoms, bonds)
        loss = criterion(predicted, point)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=atoms)
    atoms, bonds, molecule, point = collate(molecules(300, seed=2))
    with torch.no_grad():
        predicted = model(atoms, bonds, molecule) if repaired else model(atoms, bonds)
        return ((predicted - point) ** 2).mean().item() / point.var().item()


@case(
    fault="loss-plateau",
    onset=0,
    source="https://github.com/pyg-team/pytorch_geometric/issues/258",
    tags=("graph", "pooling"),
)
def molecules_pooled_into_one(attach: Attach) -> None:
    """The model is called without the vector that says which atom is whose. The pooling has a default for it, the mean
    over all atoms, so that all molecules of a batch have one prediction. That it is forgotten is feared in
    https://github.com/pyg-team/pytorch_geometric/issues/258; confusion about it in
    https://github.com/pyg-team/pytorch_geometric/issues/1272 and
    https://github.com/pyg-team/pytorch_geometric/issues/2055.
    """
    train_molecules(attach, repaired=False)


@case(source="the repaired twin of `molecules_pooled_into_one`", tags=("graph", "pooling", "twin"))
def molecules_pooled_apart(attach: Attach) -> None:
    """The model is told which atom is whose."""
    assert train_molecules(attach, repaired=True) < 0.2


# ------------------------------------------------------------------------------------ an odd recipe


class Equilibrium(nn.Module):
    """The state at which one layer does not change anything any more."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.entry = nn.Linear(inputs, width)
        self.again = nn.Linear(width, width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        given = self.entry(x)
        state = torch.zeros_like(given)
        with torch.no_grad():
            for _ in range(20):
                state = 0.5 * state + 0.5 * torch.tanh(given + self.again(state))
        for _ in range(2):
            state = 0.5 * state + 0.5 * torch.tanh(given + self.again(state))
        return self.head(state)


@case(source="Geng et al. 2021, On Training Implicit Models (phantom gradients), eq. 8", tags=("implicit", "odd"))
def digits_at_equilibrium(attach: Attach) -> None:
    """One layer is applied until its state rests, 20 times without a graph; only two more rounds have a gradient, which
    is an approximation on purpose.
    """
    torch.manual_seed(122)
    x, y, x_test, y_test = digits()
    x, x_test = x.flatten(1), x_test.flatten(1)
    model = Equilibrium(64, 80)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.02)
    monitor = attach(model, optimizer, loss_fn=F.cross_entropy)
    for i in draws(len(x), size=64, steps=400):
        loss = F.cross_entropy(model(x[i]), y[i])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        monitor.step(loss, batch=x[i])
    with torch.no_grad():
        assert (model(x_test).argmax(1) == y_test).float().mean() > 0.95
