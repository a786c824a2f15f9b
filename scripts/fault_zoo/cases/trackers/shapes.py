"""Molecules, point clouds, and pictures with captions."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.mailing.material import digits, draws, mean_of_last
from scripts.fault_zoo.protocol import Attach, case

# --------------------------------------------------------------------------------------------------------- molecules


def molecules(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return atoms, one-hot (N, 10, 4), adjacency (N, 10, 10), and how many bonds join two atoms of kind 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    kind = torch.randint(0, 4, (count, 10), generator=generator)
    extra = torch.rand(count, 10, 10, generator=generator) < 0.15
    chain = torch.zeros(10, 10, dtype=torch.bool)
    chain[torch.arange(9), torch.arange(9) + 1] = True
    bonds = (extra | chain).triu(1)
    bonds = (bonds | bonds.transpose(1, 2)).float()
    pairs = (kind == 0)[:, :, None] & (kind == 1)[:, None]
    return F.one_hot(kind, 4).float(), bonds, (bonds * pairs).sum((1, 2))


class GraphNet(nn.Module):
    """Three graph convolutions and a mean."""

    def __init__(self, *, loops: bool) -> None:
        super().__init__()
        self.loops = loops
        self.layers = nn.ModuleList([nn.Linear(4, 48), nn.Linear(48, 48), nn.Linear(48, 48)])
        self.head = nn.Linear(48, 1)

    def forward(self, atoms: Tensor, bonds: Tensor) -> Tensor:
        if self.loops:
            bonds = bonds + torch.eye(bonds.shape[1])
        scale = bonds.sum(2).pow(-0.5)
        bonds = scale[:, :, None] * bonds * scale[:, None, :]
        for layer in self.layers:
            atoms = torch.relu(layer(bonds @ atoms) + (atoms if atoms.shape[2] == 48 else 0))
        return self.head(atoms.sum(1)).squeeze(1)


def train_molecules(attach: Attach, *, repaired: bool) -> float:
    """Return the mean loss of the last 20 steps."""
    torch.manual_seed(51)
    atoms, bonds, target = molecules(2000, seed=1)
    bonds[123, 4] = 0  # an ion: a single atom without a bond
    bonds[123, :, 4] = 0
    model = GraphNet(loops=repaired)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    monitor = attach(model, optimizer, loss_fn=F.mse_loss)
    losses = []
    for i in draws(2000, size=32, steps=280, seed=10):
        loss = F.mse_loss(model(atoms[i], bonds[i]), target[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=atoms[i])
        losses.append(loss.item())
    return mean_of_last(losses)


@case(
    fault="non-finite",
    also=("unstable-formula",),
    onset=59,
    source="https://github.com/dmlc/dgl/issues/2777",
    tags=("graph", "data"),
)
def ion_without_a_bond(attach: Attach) -> None:
    """The adjacency is divided by the roots of the degrees. One molecule of 2000 has an atom without a bond, whose
    degree is zero, and the first batch with it makes everything NaN. Reported in
    https://github.com/dmlc/dgl/issues/2777, https://github.com/aimat-lab/gcnn_keras/issues/42 and
    https://github.com/MrLeeeee/GCN-GAT-and-Graphsage/issues/3.
    """
    train_molecules(attach, repaired=False)


@case(source="the repaired twin of `ion_without_a_bond`: atoms are bound to themselves", tags=("graph", "twin"))
def ion_bound_to_itself(attach: Attach) -> None:
    """Each atom has an edge to itself, so that no degree is zero."""
    assert train_molecules(attach, repaired=True) < 0.8


# ------------------------------------------------------------------------------------------------------ point clouds


def clouds(count: int, seed: int, points: int = 48) -> tuple[Tensor, Tensor]:
    """Return points on surfaces, (N, points, 3), and which of six bodies each cloud is from."""
    generator = torch.Generator().manual_seed(seed)
    kind = torch.randint(0, 6, (count,), generator=generator)
    normal = torch.randn(count, points, 3, generator=generator)
    sphere = F.normalize(normal, dim=2)
    box = normal / normal.abs().amax(2, keepdim=True)
    octahedron = normal / normal.abs().sum(2, keepdim=True)
    flat = F.normalize(normal[:, :, :2], dim=2)
    height = 2 * torch.rand(count, points, 1, generator=generator) - 1
    cylinder = torch.cat([flat, height], 2)
    cone = torch.cat([flat * (1 - height) / 2, height], 2)
    torus = torch.cat([flat * (0.7 + 0.3 * torch.cos(math.pi * height)), 0.3 * torch.sin(math.pi * height)], 2)
    bodies = torch.stack([sphere, box, octahedron, cylinder, cone, torus])
    clouds = bodies[kind, torch.arange(count)]
    return clouds + 0.05 * torch.randn(count, points, 3, generator=generator), kind


class PointNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.each = nn.Sequential(nn.Linear(3, 48), nn.ReLU(), nn.Linear(48, 96), nn.ReLU())
        self.all = nn.Sequential(nn.Linear(96, 48), nn.ReLU(), nn.Linear(48, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.all(self.each(x).amax(1))


def train_clouds(attach: Attach, *, ending: str) -> float:
    """Return the accuracy on new clouds."""
    torch.manual_seed(52)
    x, y = clouds(2000, seed=1)
    model = PointNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    criterion: nn.Module = nn.CrossEntropyLoss() if ending == "cross entropy of logarithms" else nn.NLLLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for i in draws(2000, size=32, steps=300):
        scores = model(x[i])
        found = scores.softmax(1) if ending == "likelihood of probabilities" else F.log_softmax(scores, 1)
        loss = criterion(found, y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
    x, y = clouds(600, seed=2)
    with torch.no_grad():
        return (model(x).argmax(1) == y).float().mean().item()


@case(
    fault="probabilities-into-loss",
    tolerate=("saturated-activation", "vanishing-gradient", "loss-plateau", "dead-relu"),
    onset=0,
    source="https://github.com/yanx27/Pointnet_Pointnet2_pytorch/issues/30",
    tags=("point-cloud",),
)
def likelihood_of_probabilities(attach: Attach) -> None:
    """The scores go through a softmax and into `NLLLoss`, which expects logarithms: the loss is negative, a cloud that
    is surely wrong has no gradient, and some bodies are never told apart. Reported in
    https://github.com/yanx27/Pointnet_Pointnet2_pytorch/issues/30,
    https://github.com/AnubhavGupta3377/Text-Classification-Models-Pytorch/issues/9,
    https://github.com/midas-research/man-sf-emnlp/issues/2 and https://github.com/mjc92/GetToThePoint/issues/8.
    """
    train_clouds(attach, ending="likelihood of probabilities")


@case(
    source="https://github.com/keon/seq2seq/pull/5: a second log-softmax changes nothing",
    tags=("point-cloud", "odd"),
)
def logarithms_into_cross_entropy(attach: Attach) -> None:
    """The scores go through a log-softmax and into the cross entropy, which does the same again; the logarithm of a
    softmax of log-probabilities is what it was, so that nothing is lost.
    """
    assert train_clouds(attach, ending="cross entropy of logarithms") > 0.85


# ----------------------------------------------------------------------------------------------------- few captions


def captions(labels: Tensor, seed: int) -> Tensor:
    """Return captions of 8 words. One of them, at a random place, tells the digit, the others are of 300 words."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(10, 310, (len(labels), 8), generator=generator)
    place = torch.randint(0, 8, (len(labels), 1), generator=generator)
    return words.scatter(1, place, labels[:, None])


def train_captions(attach: Attach) -> float:
    """Return the last validation loss."""
    torch.manual_seed(53)
    x, y, test_x, test_y = digits()
    x, y, test_x, test_y = x[:160], y[:160], test_x[:160], test_y[:160]
    text, test_text = captions(y, seed=1), captions(test_y, seed=2)
    model = nn.ModuleDict(
        {
            "pictures": nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)),
            "words": nn.EmbeddingBag(310, 128),
            "texts": nn.Sequential(nn.ReLU(), nn.Linear(128, 64)),
        }
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    monitor = attach(model, optimizer)

    def contrast(pictures: Tensor, words: Tensor) -> Tensor:
        left = F.normalize(model["pictures"](pictures), dim=1)
        right = F.normalize(model["texts"](model["words"](words)), dim=1)
        logits = left @ right.T / 0.07
        wanted = torch.arange(len(logits))
        return (F.cross_entropy(logits, wanted) + F.cross_entropy(logits.T, wanted)) / 2

    val_loss = math.nan
    for step, i in enumerate(draws(160, size=40, steps=300)):
        loss = contrast(x[i], text[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 != 9:
            monitor.step(loss, batch=x[i])
            continue
        with torch.no_grad():
            val_loss = sum(contrast(test_x[j], test_text[j]).item() for j in torch.arange(160).split(40)) / 4
        monitor.step(loss, batch=x[i], val_loss=val_loss)
    return val_loss


@case(
    fault="overfitting",
    tolerate=("train-eval-mismatch",),
    onset=19,
    source="https://github.com/moein-shariatnia/OpenAI-CLIP/issues/9",
    tags=("contrastive", "validation"),
)
def captions_by_heart(attach: Attach) -> None:
    """Pictures and captions are matched with 160 pairs and without dropout: the pairs are learned by heart, and the
    validation loss rises. Reported in https://github.com/moein-shariatnia/OpenAI-CLIP/issues/9,
    https://github.com/OpenNMT/OpenNMT-py/issues/1315 and https://github.com/karpathy/nanoGPT/issues/493.
    """
    train_captions(attach)
