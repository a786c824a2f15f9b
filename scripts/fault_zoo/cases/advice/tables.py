"""Tables: a target of another shape, a column of another unit, scores that are far apart, and tags that are rare."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from sklearn.datasets import load_diabetes
from torch import Tensor, nn

from scripts.fault_zoo.cases.mailing.material import draws
from scripts.fault_zoo.protocol import Attach, case

# ------------------------------------------------------------------------------------ a target of another shape


@case(
    fault="loss-plateau",
    also=("probabilities-into-loss",),
    tolerate=("overfitting",),
    onset=0,
    source="https://discuss.pytorch.org/t/output-of-the-model-depends-on-the-shape-of-the-weights-tensor/148155",
    tags=("tabular", "regression", "loss"),
)
def progress_of_another_shape(attach: Attach) -> None:
    """The outputs have the shape (N, 1) and the targets (N,). Their difference is a table of N x N, and the best
    output is the mean of the batch, whatever the patient. PyTorch prints a warning. With equal shapes, the loss falls
    to 0.5.
    """
    torch.manual_seed(621)
    data = load_diabetes()
    x = torch.tensor(data.data / data.data.std(0), dtype=torch.float32)
    y = torch.tensor((data.target - data.target.mean()) / data.target.std(), dtype=torch.float32)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    criterion = nn.MSELoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for i in draws(len(x), size=32, steps=250):
        loss = criterion(model(x[i]), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])


# ------------------------------------------------------------------------------------ a column of another unit


def weather(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return days of 12 readings of temperature (deviations), humidity (0 to 1) and pressure (Pa), and what is next."""
    generator = torch.Generator().manual_seed(seed)
    hour = torch.arange(13) / 12 * 6.28 + 6.28 * torch.rand(count, 1, generator=generator)
    temperature = hour.sin() + 0.1 * torch.randn(count, 13, generator=generator)
    humidity = 0.5 - 0.3 * hour.cos() + 0.05 * torch.randn(count, 13, generator=generator)
    pressure = 101_300 + 600 * torch.randn(count, 13, generator=generator)
    readings = torch.stack([temperature, humidity, pressure], 2)
    return readings[:, :12], temperature[:, 12]


def train_forecast(attach: Attach, *, columns: list[int]) -> float:
    """Return the mean squared error on new days; the variance is 0.5."""
    torch.manual_seed(622)
    x, y = weather(1500, seed=1)
    x = x[:, :, columns].flatten(1)
    model = nn.Sequential(nn.Linear(x.shape[1], 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    criterion = nn.MSELoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for i in draws(len(x), size=32, steps=250):
        loss = criterion(model(x[i]).squeeze(1), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
    x_test, y_test = weather(300, seed=2)
    with torch.no_grad():
        return F.mse_loss(model(x_test[:, :, columns].flatten(1)).squeeze(1), y_test).item()


@case(
    fault="exploding-gradient",
    also=("non-finite", "learning-rate-too-high", "poor-initialization", "layer-imbalance"),
    tolerate=("gradient-spike",),
    onset=0,
    source="https://e-com-net.com/article/1695794721454108672.htm",
    tags=("tabular", "data"),
)
def pressure_in_pascals(attach: Attach) -> None:
    """One of three columns is 100,000 times as large as the others. The gradient is too, and the loss is NaN from the
    third step on.
    """
    train_forecast(attach, columns=[0, 1, 2])


@case(source="the repaired twin of `pressure_in_pascals`", tags=("tabular", "data", "twin"))
def pressure_left_out(attach: Attach) -> None:
    """The column is left out, which was the answer, and the error on new days is below 0.05."""
    assert train_forecast(attach, columns=[0, 1]) < 0.05


# ------------------------------------------------------------------------------------ scores that are far apart


class GraphRecommender(nn.Module):
    """Vectors of readers and books, to each of which those of its neighbours are added (Wang et al. 2019)."""

    def __init__(self, links: Tensor, width: int = 32) -> None:
        super().__init__()
        self.links = links
        self.readers, self.books = nn.Embedding(len(links), width), nn.Embedding(links.shape[1], width)
        self.mix = nn.Linear(width, width, bias=False)

    def forward(self, reader: Tensor, book: Tensor) -> Tensor:
        readers, books = self.readers.weight, self.books.weight
        seen_by = readers + F.leaky_relu(self.mix(self.links @ books))
        sees = books + F.leaky_relu(self.mix(self.links.T @ readers))
        return (seen_by[reader] * sees[book]).sum(1)


def train_recommender(attach: Attach, *, stable: bool) -> float:
    """Return the share of pairs in which a book that was read is above one that was not."""
    torch.manual_seed(623)
    generator = torch.Generator().manual_seed(4)
    taste, kind = torch.randint(0, 5, (200,), generator=generator), torch.randint(0, 5, (150,), generator=generator)
    likes = torch.where(taste[:, None] == kind, 0.3, 0.02)
    read = torch.rand(likes.shape, generator=generator) < likes
    shown = read & (torch.rand(likes.shape, generator=generator) < 0.8)
    model = GraphRecommender(shown.float())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    monitor = attach(model, optimizer)

    def pairs(of: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        picked = of.nonzero()[torch.randint(0, int(of.sum()), (count,), generator=generator)]
        other = torch.randint(0, 150, (count,), generator=generator)
        is_new = ~read[picked[:, 0], other]
        return picked[is_new, 0], picked[is_new, 1], other[is_new]

    for _ in range(300):
        reader, book, other = pairs(shown, 128)
        ahead = model(reader, book) - model(reader, other)
        loss = F.softplus(-ahead).mean() if stable else -torch.log(torch.sigmoid(ahead)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=torch.stack([reader, book]))
    reader, book, other = pairs(read & ~shown, 1000)
    with torch.no_grad():
        return (model(reader, book) > model(reader, other)).float().mean().item()


@case(
    fault="non-finite",
    also=("unstable-formula",),
    tolerate=("poor-initialization",),
    onset=0,
    source="https://github.com/xiangwang1223/neural_graph_collaborative_filtering/issues/17",
    tags=("recommendation", "loss"),
)
def logarithm_of_a_sigmoid(attach: Attach) -> None:
    """A ranking loss is the logarithm of a sigmoid of the difference of two scores. The scores of a graph network are
    far apart, the sigmoid of -104 is 0, and its logarithm has no gradient.
    """
    train_recommender(attach, stable=False)


@case(source="the repaired twin of `logarithm_of_a_sigmoid`", tags=("recommendation", "loss", "twin"))
def softplus_of_a_difference(attach: Attach) -> None:
    """The softplus of the difference is the same and stays finite, and more than 65 % of new pairs are right."""
    assert train_recommender(attach, stable=True) > 0.65


# ------------------------------------------------------------------------------------ tags that are rare


@case(
    fault="loss-plateau",
    onset=0,
    source="https://github.com/appvision-ai/fast-bert/issues/52",
    tags=("text", "multilabel", "imbalance"),
)
def five_hundred_rare_tags(attach: Attach) -> None:
    """A network gives tags to texts. There are 500 tags, and a text has one or two. The loss falls fast to that of a
    network that gives no tag at all, and no tag is given. With a weight of 100 for tags, three of four are found.
    """
    torch.manual_seed(624)
    generator = torch.Generator().manual_seed(5)
    keywords = torch.randint(0, 1000, (500, 3), generator=generator)
    model = nn.Sequential(nn.EmbeddingBag(1000, 64), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 500))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    criterion = nn.BCEWithLogitsLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for _ in range(300):
        tag = torch.randint(0, 500, (32, 2), generator=generator)
        others = torch.randint(0, 1000, (32, 14), generator=generator)
        words = torch.cat([keywords[tag].flatten(1), others], 1)
        wanted = torch.zeros(32, 500).scatter(1, tag, 1.0)
        loss = criterion(model(words), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=words)
