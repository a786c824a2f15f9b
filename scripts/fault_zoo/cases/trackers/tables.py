"""Tables: prices, posteriors, codes, survival, ratings, and recipes that write their own gradients."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from sklearn.datasets import make_moons
from torch import Tensor, nn
from torch.func import functional_call, vmap

from scripts.fault_zoo.cases.mailing.material import digits, draws, mean_of_last
from scripts.fault_zoo.protocol import Attach, case

# ------------------------------------------------------------------------------------------------------------ prices


def houses(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return area in square feet, rooms, year and distance in miles, (N, 4), and prices in 1000 dollars, (N, 1)."""
    generator = torch.Generator().manual_seed(seed)
    draw = torch.rand(count, 4, generator=generator)
    x = torch.stack([500 + 4000 * draw[:, 0], 1 + (8 * draw[:, 1]).floor(), 1930 + 90 * draw[:, 2], 25 * draw[:, 3]], 1)
    price = 0.12 * x[:, 0] + 12 * x[:, 1] + 0.8 * (x[:, 2] - 1930) - 4 * x[:, 3]
    return x, (price + 15 * torch.randn(count, generator=generator))[:, None]


def train_houses(attach: Attach, *, scaled: bool) -> float:
    """Return the mean loss of the last 20 steps."""
    torch.manual_seed(61)
    x, y = houses(2000, seed=1)
    if scaled:
        x, y = (x - x.mean(0)) / x.std(0), (y - y.mean()) / y.std()
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    criterion = nn.MSELoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    losses = []
    for i in draws(2000, size=32, steps=200):
        loss = criterion(model(x[i]), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
        losses.append(loss.item())
    return mean_of_last(losses)


@case(
    fault="exploding-gradient",
    also=("non-finite", "learning-rate-too-high"),
    tolerate=("poor-initialization", "gradient-spike", "oscillating-gradient"),
    onset=0,
    source="https://syntaxbug.com/d1e7d3ba69/",
    tags=("regression", "units"),
)
def prices_from_square_feet(attach: Attach) -> None:
    """Areas up to 4500 and years near 2000 go into a linear regression as they are, and the loss is the square of an
    error in the hundreds: gradients are huge from the start, and the loss is NaN after a few steps. Reported for house
    prices in https://syntaxbug.com/d1e7d3ba69/ ("the reason for loss is NAN"); the same in smaller tables again and
    again in forums, as in https://discuss.pytorch.org, "Data normalization, learning rate, and loss relationship".
    """
    train_houses(attach, scaled=False)


# -------------------------------------------------------------------------------------------------------- posteriors


class Posterior(nn.Module):
    """A normal distribution of two parameters, given data."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))

    def forward(self, data: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self.net(data).chunk(2, 1)
        return mean, log_std


def simulate(count: int, generator: torch.Generator, center: Tensor, width: float) -> tuple[Tensor, Tensor]:
    """Draw slopes and offsets, and simulate 20 noisy points of each line."""
    theta = center + width * torch.randn(count, 2, generator=generator)
    line = theta[:, :1] * torch.linspace(-1, 1, 20) + theta[:, 1:]
    return theta, line + 0.3 * torch.randn(count, 20, generator=generator)


def train_posterior(attach: Attach, *, repaired: bool) -> float:
    """Fit a posterior twice: after the first round, it is trained from scratch on simulations that are nearer."""
    torch.manual_seed(62)
    generator = torch.Generator().manual_seed(0)
    model = Posterior()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(100):
        theta, data = simulate(64, generator, torch.zeros(2), 2.0)
        mean, log_std = model(data)
        optimizer.zero_grad()
        (log_std + 0.5 * ((theta - mean) / log_std.exp()) ** 2).mean().backward()
        optimizer.step()

    model = Posterior()  # retrain_from_scratch
    if repaired:
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor = attach(model, optimizer)
    losses = []
    for _ in range(200):
        theta, data = simulate(64, generator, torch.tensor([1.0, -0.5]), 1.0)
        mean, log_std = model(data)
        loss = (log_std + 0.5 * ((theta - mean) / log_std.exp()) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=data)
        losses.append(loss.item())
    return mean_of_last(losses)


@case(
    fault="not-optimized",
    also=("missing-zero-grad", "loss-plateau"),
    onset=0,
    source="https://github.com/sbi-dev/sbi/issues/200",
    tags=("inference", "retraining"),
)
def scratch_with_the_old_optimizer(attach: Attach) -> None:
    """For the second round a new network is made, and the optimizer still has the parameters of the old one: nothing
    learns. Reported in https://github.com/sbi-dev/sbi/issues/200,
    https://github.com/kitzeslab/opensoundscape/issues/351 and https://github.com/ContinualAI/avalanche/issues/756.
    """
    train_posterior(attach, repaired=False)


# -------------------------------------------------------------------------------------------------- a sum over all


def train_codes(attach: Attach, *, reduction: str) -> float:
    """Return the error of each pixel of new digits."""
    torch.manual_seed(63)
    data, _, test, _ = digits()
    x, test = data.flatten(1), test.flatten(1)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    monitor = attach(model, optimizer)
    for i in draws(len(x), size=128, steps=250):
        codes = model[:2](x[i])
        rebuilt = model[2](codes)
        error = (rebuilt - x[i]).square().sum(1) + 0.01 * codes.abs().sum(1)
        loss = error.sum() if reduction == "sum" else error.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
    with torch.no_grad():
        return (model(test) - test).square().mean().item()


@case(
    fault="learning-rate-too-high",
    also=("exploding-gradient", "non-finite", "gradient-spike"),
    tolerate=("dead-relu", "loss-plateau", "dead-layer", "rising-sparsity", "no-gradient", "oscillating-gradient"),
    onset=0,
    source="https://github.com/jax-ml/jax/pull/3113",
    tags=("autoencoder", "reduction"),
)
def codes_with_a_summed_loss(attach: Attach) -> None:
    """The loss of a sparse autoencoder is summed over the batch, with the rate for a mean: every step is 128 times too
    large. Reported in https://github.com/jax-ml/jax/pull/3113 (exploding gradients in larger batches) and
    https://github.com/ai-safety-foundation/sparse_autoencoder/issues/63.
    """
    train_codes(attach, reduction="sum")


# ------------------------------------------------------------------------------------------------------- odd recipes


@case(source="Cox 1972; Katzman et al. 2018, DeepSurv, eq. 4", tags=("survival", "odd"))
def patients_in_order_of_death(attach: Attach) -> None:
    """The loss is the partial likelihood of who dies first among those who are left. It depends on the size of the
    batch and falls by a tenth only.
    """
    torch.manual_seed(64)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2400, 10, generator=generator)
    risk = x[:, 0] - 0.8 * x[:, 1] + x[:, 2] * x[:, 3]
    time = -torch.rand(2400, generator=generator).log() * torch.exp(-risk)
    censored = 3 * torch.rand(2400, generator=generator)
    died = (time < censored).float()
    time = torch.minimum(time, censored)
    model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-2)
    monitor = attach(model, optimizer)
    for i in draws(2000, size=100, steps=300):
        score = model(x[i]).squeeze(1)
        left = time[i][None] >= time[i][:, None]
        loss = (died[i] * (torch.logsumexp(score.masked_fill(~left, -math.inf), 1) - score)).sum() / died[i].sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
    with torch.no_grad():
        score = model(x[2000:]).squeeze(1)
    comparable = (time[2000:][:, None] < time[2000:][None]) & (died[2000:] > 0)[:, None]
    assert (score[:, None] > score[None])[comparable].float().mean() > 0.72


@case(
    source="Rolnick et al. 2018, Deep learning is robust to massive label noise",
    tags=("labels", "odd"),
)
def every_second_label_is_a_guess(attach: Attach) -> None:
    """Half of the labels are drawn at random. The training loss stays above 1.5, and the network is right nine times of
    ten all the same.
    """
    torch.manual_seed(65)
    x, y, test_x, test_y = digits()
    wrong = torch.rand(len(y)) < 0.5
    y = torch.where(wrong, torch.randint(0, 10, y.shape), y)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Dropout(0.3), nn.Linear(48, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for i in draws(len(x), size=64, steps=280):
        loss = criterion(model(x[i]), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
    model.eval()
    with torch.no_grad():
        assert (model(test_x).argmax(1) == test_y).float().mean() > 0.85


@case(source="Hu et al. 2008, Koren et al. 2009: alternating steps of users and items", tags=("recommender", "odd"))
def readers_and_books_in_turn(attach: Attach) -> None:
    """Factors of users and of items are learned in turn, 20 steps each: half of the parameters are frozen at any time
    and have no gradient.
    """
    torch.manual_seed(66)
    generator = torch.Generator().manual_seed(0)
    taste, style = torch.randn(120, 3, generator=generator), torch.randn(80, 3, generator=generator)
    user, item = (torch.randint(0, n, (9000,), generator=generator) for n in (120, 80))
    rating = (taste[user] * style[item]).sum(1) + 0.2 * torch.randn(9000, generator=generator)
    readers, books = nn.Embedding(120, 6), nn.Embedding(80, 6)
    for table in (readers, books):
        nn.init.normal_(table.weight, std=0.3)
    model = nn.ModuleDict({"readers": readers, "books": books})
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    monitor = attach(model, optimizer, loss_fn=F.mse_loss)
    losses = []
    for step, i in enumerate(draws(9000, size=256, steps=320)):
        turn = step // 20 % 2
        readers.requires_grad_(turn == 0)
        books.requires_grad_(turn == 1)
        loss = F.mse_loss((readers(user[i]) * books(item[i])).sum(1), rating[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=torch.stack([user[i], item[i]], 1))
        losses.append(loss.item())
    assert mean_of_last(losses) < 0.5


@case(source="Salimans et al. 2017, Evolution strategies, alg. 1, with antithetic pairs", tags=("evolution", "odd"))
def moons_by_evolution(attach: Attach) -> None:
    """No backward() is called: the weights are shaken 50 times in both directions, and the gradient is made of how much
    better or worse the loss gets. It is noisy and never small.
    """
    torch.manual_seed(67)
    points, labels = make_moons(800, noise=0.15, random_state=0)
    x, y = torch.tensor(points, dtype=torch.float32), torch.tensor(labels)
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)

    def loss_at(weights: dict[str, Tensor], batch: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, weights, (batch,)), wanted)

    for i in draws(800, size=100, steps=250):
        with torch.no_grad():
            weights = dict(model.named_parameters())
            noise = {name: torch.randn(50, *p.shape) for name, p in weights.items()}
            up = {name: p + 0.05 * noise[name] for name, p in weights.items()}
            down = {name: p - 0.05 * noise[name] for name, p in weights.items()}
            change = vmap(loss_at, (0, None, None))(up, x[i], y[i]) - vmap(loss_at, (0, None, None))(down, x[i], y[i])
            loss = criterion(model(x[i]), y[i])
        for name, p in model.named_parameters():
            p.grad = torch.einsum("n,n...->...", change, noise[name]) / (2 * 0.05 * 50)
        optimizer.step()
        monitor.step(loss, batch=x[i])
    with torch.no_grad():
        assert (model(x).argmax(1) == y).float().mean() > 0.93
