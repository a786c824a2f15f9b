"""Molecules and graphs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.faulty_data import batches, communities, setup
from scripts.fault_zoo.protocol import Attach, case


def peptides(count: int = 2000, length: int = 20) -> tuple[Tensor, Tensor]:
    """Return chains of amino acids (1..20, padded with 0) and their retention times, standardised."""
    generator = torch.Generator().manual_seed(61)
    sizes = torch.randint(7, length + 1, (count,), generator=generator)
    chains = torch.randint(1, 21, (count, length), generator=generator)
    chains = chains.masked_fill(torch.arange(length) >= sizes[:, None], 0)
    attraction = torch.randn(21, generator=generator)
    attraction[0] = 0
    times = attraction[chains].sum(1) + 0.3 * sizes.sqrt() * torch.randn(count, generator=generator)
    return chains, (times - times.mean()) / times.std()


class RetentionModel(nn.Module):
    """Predict when a peptide leaves the column."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(21, dim, padding_idx=0)
        self.lstm = nn.LSTM(dim, dim, batch_first=True)
        self.head = nn.Sequential(nn.Linear(dim, 1), nn.ReLU())

    def forward(self, chains: Tensor) -> Tensor:
        states, _ = self.lstm(self.embed(chains))
        return self.head(states.mean(1)).squeeze(1)


@case(
    fault="dead-relu",
    also=("no-gradient", "dead-layer", "loss-plateau", "vanishing-gradient"),
    layers=("head",),
    onset=0,
    source="https://github.com/ProteomicsML/ProteomicsML/pull/203 (the network predicts 0 for all peptides)",
    tags=("regression",),
)
def retention_final_relu(attach: Attach) -> None:
    """A ReLU after the last layer of a regression: its inputs are all negative, the prediction is always 0."""
    setup(73)
    chains, times = peptides()
    model = RetentionModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    criterion = nn.MSELoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for chain, time in batches(chains, times, size=64, steps=250):
        loss = criterion(model(chain), time)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=chain)


class DeepGraphNet(nn.Module):
    """Graph convolutions without residual connections."""

    spread: Tensor

    def __init__(self, links: Tensor, dim: int, classes: int, width: int = 32, depth: int = 16) -> None:
        super().__init__()
        self.register_buffer("spread", links)
        self.entry = nn.Linear(dim, width)
        self.convs = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.exit = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.entry(x))
        for conv in self.convs:
            x = torch.relu(self.spread @ conv(x))
        return self.exit(x)


@case(
    fault="vanishing-gradient",
    also=("loss-plateau", "poor-initialization", "dead-layer", "no-gradient"),
    layers=("entry", "convs"),
    onset=0,
    tolerate=("layer-imbalance", "constant-batch", "dead-relu", "rising-sparsity"),
    source="https://github.com/lightaime/deep_gcns_torch/issues/10 (a deeper network gets worse)",
    tags=("graph",),
)
def sixteen_graph_convolutions(attach: Attach) -> None:
    """Sixteen graph convolutions smooth all nodes to one vector, and the first layers get almost no gradient."""
    setup(62)
    links, x, groups = communities(n=300)
    links = links + torch.eye(300)
    root = links.sum(1).rsqrt()
    known = torch.rand(300) < 0.5
    model = DeepGraphNet(root[:, None] * links * root, x.shape[1], 5)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=5e-4)
    monitor = attach(model, optimizer)
    for _ in range(200):
        loss = F.cross_entropy(model(x)[known], groups[known])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x)
