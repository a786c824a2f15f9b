"""Graphs in batches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from scripts.fault_zoo.cases.mailing.material import draws, mean_of_last
from scripts.fault_zoo.protocol import Attach, case


@dataclass(frozen=True)
class Graph:
    """A small graph: charges of the nodes (N,), both directions of each edge (2, E), and if like charges prevail."""

    charges: Tensor
    edges: Tensor
    label: float


@lru_cache(None)
def charged_graphs(count: int = 800, seed: int = 5) -> list[Graph]:
    """Return random trees with some more edges, whose nodes have charges of -1 or 1."""
    generator = torch.Generator().manual_seed(seed)
    graphs = []
    for _ in range(count):
        nodes = int(torch.randint(8, 13, (), generator=generator))
        charges = torch.randint(0, 2, (nodes,), generator=generator).float() * 2 - 1
        parents = (torch.rand(nodes - 1, generator=generator) * torch.arange(1, nodes)).long()
        tree = torch.stack([torch.arange(1, nodes), parents])
        more = torch.randint(0, nodes, (2, 4), generator=generator)
        edges = torch.cat([tree, more], 1)
        agreement = (charges[edges[0]] * charges[edges[1]]).sum().item()
        graphs.append(Graph(charges, torch.cat([edges, edges.flip(0)], 1), float(agreement > 0)))
    return graphs


def collate(graphs: list[Graph], *, offset: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return one large graph: charges, edges, the graph of each node, and labels."""
    sizes = torch.tensor([len(graph.charges) for graph in graphs])
    first = sizes.cumsum(0) - sizes
    edges = [graph.edges + (start if offset else 0) for graph, start in zip(graphs, first, strict=True)]
    owner = torch.repeat_interleave(torch.arange(len(graphs)), sizes)
    labels = torch.tensor([graph.label for graph in graphs])
    return torch.cat([graph.charges for graph in graphs])[:, None], torch.cat(edges, 1), owner, labels


class Convolution(nn.Module):
    """Add what the neighbors say to what the node says."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.own = nn.Linear(inputs, outputs)
        self.others = nn.Linear(inputs, outputs, bias=False)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        heard = torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])
        return torch.relu(self.own(x) + self.others(heard))


class GraphNet(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first, self.second = Convolution(1, width), Convolution(width, width)
        self.head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, x: Tensor, edges: Tensor, owner: Tensor, count: int) -> Tensor:
        x = self.second(self.first(x, edges), edges)
        return self.head(x.new_zeros(count, x.shape[1]).index_add(0, owner, x) / 10).squeeze(1)


def train_graphs(attach: Attach, *, repaired: bool) -> float:
    """Return the mean loss of the last 20 steps."""
    torch.manual_seed(401)
    graphs = charged_graphs()
    model = GraphNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    criterion = nn.BCEWithLogitsLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    losses = []
    for i in draws(len(graphs), size=32, steps=300):
        x, edges, owner, labels = collate([graphs[j] for j in i.tolist()], offset=repaired)
        loss = criterion(model(x, edges, owner, len(labels)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x)
        losses.append(loss.item())
    return mean_of_last(losses)


@case(
    fault="loss-plateau",
    tolerate=("layer-imbalance", "dead-layer"),
    onset=0,
    source="https://github.com/e3nn/e3nn/pull/389",
    tags=("graph", "data"),
)
def edges_of_the_first_graph(attach: Attach) -> None:
    """Edges are stored under a name that the batching does not know, so their node numbers are not raised: the edges of
    all graphs of a batch lie on the nodes of the first one, and the others have none. Reported in
    https://github.com/e3nn/e3nn/pull/389 and https://github.com/pyg-team/pytorch_geometric/issues/1499.
    """
    train_graphs(attach, repaired=False)
