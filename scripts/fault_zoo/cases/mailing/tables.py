"""Tables and ratings, and how the weights of their networks are held small."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from scripts.fault_zoo.cases.mailing.material import digits, draws, mean_of_last
from scripts.fault_zoo.protocol import Attach, case

# ------------------------------------------------------------------------------------------- one output, one softmax


def train_tumors(attach: Attach, *, repaired: bool) -> float:
    """Return the accuracy on 119 patients."""
    torch.manual_seed(501)
    table = load_breast_cancer()
    x = torch.tensor(table.data, dtype=torch.float32)
    x = (x - x.mean(0)) / x.std(0)
    y = torch.tensor(table.target, dtype=torch.float32)[:, None]
    model = nn.Sequential(nn.Linear(30, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.BCEWithLogitsLoss() if repaired else nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for i in draws(450, size=32, steps=250):
        loss = criterion(model(x[i]), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
    with torch.no_grad():
        return ((model(x[450:]) > 0) == (y[450:] > 0)).float().mean().item()


@case(
    fault="no-gradient",
    also=("loss-plateau", "dead-layer", "vanishing-gradient", "not-optimized"),
    onset=0,
    source="https://github.com/open-mmlab/mmsegmentation/issues/2201",
    tags=("tabular",),
)
def cross_entropy_of_one_output(attach: Attach) -> None:
    """Two classes, one output and `CrossEntropyLoss`: the softmax over one number is 1, and loss and gradient are zero
    from the first step on. Reported in https://github.com/open-mmlab/mmsegmentation/issues/2201,
    https://github.com/ultralytics/yolov3/issues/191 and https://github.com/darioizzo/dcgp/issues/86.
    """
    train_tumors(attach, repaired=False)


@case(source="the repaired twin of `cross_entropy_of_one_output`: BCEWithLogitsLoss", tags=("tabular", "twin"))
def binary_cross_entropy_of_one_output(attach: Attach) -> None:
    """Two classes, one output, and the loss for it."""
    assert train_tumors(attach, repaired=True) > 0.93


# ------------------------------------------------------------------------------------------ stars beyond the sigmoid


class Rater(nn.Module):
    """Neural collaborative filtering: the vectors of a user and of a film go through a perceptron."""

    def __init__(self, users: int, films: int, *, squash: bool) -> None:
        super().__init__()
        self.users, self.films = nn.Embedding(users, 16), nn.Embedding(films, 16)
        self.net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
        self.predict = nn.Sequential(nn.Linear(32, 1), nn.Sigmoid() if squash else nn.Identity())

    def forward(self, user: Tensor, film: Tensor) -> Tensor:
        return self.predict(self.net(torch.cat([self.users(user), self.films(film)], 1))).squeeze(1)


def ratings(users: int, films: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return users, films, and stars from 1 to 5, which follow the tastes of users and the quality of films."""
    generator = torch.Generator().manual_seed(6)
    taste, style = (torch.randn(n, 4, generator=generator) for n in (users, films))
    quality = torch.randn(films, generator=generator)
    user = torch.randint(0, users, (count,), generator=generator)
    film = torch.randint(0, films, (count,), generator=generator)
    stars = 3.4 + 0.7 * quality[film] + 0.3 * (taste[user] * style[film]).sum(1)
    return user, film, (stars + 0.3 * torch.randn(count, generator=generator)).round().clamp(1, 5)


def train_ratings(attach: Attach, *, repaired: bool) -> float:
    """Return the mean loss of the last 20 steps."""
    torch.manual_seed(502)
    user, film, stars = ratings(150, 100, 8000)
    model = Rater(150, 100, squash=not repaired)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    criterion = nn.MSELoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    losses = []
    for i in draws(8000, size=128, steps=300):
        loss = criterion(model(user[i], film[i]), stars[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=torch.stack([user[i], film[i]], 1))
        losses.append(loss.item())
    return mean_of_last(losses)


@case(
    fault="saturated-activation",
    also=("loss-plateau", "vanishing-gradient", "dead-layer"),
    layers=("predict",),
    onset=10,
    source="https://github.com/recommenders-team/recommenders/issues/796",
    tags=("recommender",),
)
def stars_beyond_the_sigmoid(attach: Attach) -> None:
    """The network for implicit feedback, which ends in a sigmoid, is trained on ratings from 1 to 5: its output is
    driven to 1 for everything. Reported in https://github.com/recommenders-team/recommenders/issues/796 and
    https://github.com/hexiangnan/neural_collaborative_filtering/issues/46.
    """
    train_ratings(attach, repaired=False)


# ------------------------------------------------------------------------------------------- weights that decay away


def train_decayed(attach: Attach, *, repaired: bool) -> float:
    """Return the mean loss of the last 20 steps."""
    torch.manual_seed(503)
    x, y, _, _ = digits()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, weight_decay=5e-4 if repaired else 0.5)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    losses = []
    for i in draws(len(x), size=64, steps=300):
        loss = criterion(model(x[i]), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
        losses.append(loss.item())
    return mean_of_last(losses)


@case(
    fault="loss-plateau",
    also=("vanishing-gradient", "dead-layer"),
    tolerate=("dead-relu", "rising-sparsity", "layer-imbalance"),
    onset=0,
    source="https://github.com/BVLC/caffe/issues/1396",
    tags=("weight-decay",),
)
def weights_that_decay_away(attach: Attach) -> None:
    """A weight decay of 0.5 for everything: all weights shrink to zero, every input has the same output, and the loss
    stays that of a guess. Reported in https://github.com/BVLC/caffe/issues/1396; see also
    https://github.com/HoloClean/holoclean/pull/75. No kind names the decay; the plateau that it ends in is named.
    """
    train_decayed(attach, repaired=False)


# --------------------------------------------------------------------------------------------- privacy through noise


@case(source="Abadi et al. 2016, Deep learning with differential privacy, alg. 1", tags=("privacy", "odd"))
def gradients_for_privacy(attach: Attach) -> None:
    """The gradient of each sample is clipped and noise is added to their sum, so that no sample can be read from the
    weights. No backward() is called: the script writes the gradients itself.
    """
    torch.manual_seed(504)
    x, y, test_x, test_y = (t.flatten(1) if t.dim() > 1 else t for t in digits())
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    monitor = attach(model, optimizer)

    def loss_of_one(weights: dict[str, Tensor], sample: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, weights, (sample[None],)), label[None])

    each = vmap(grad_and_value(loss_of_one), in_dims=(None, 0, 0))
    for i in draws(len(x), size=128, steps=250):
        weights = {name: p.detach() for name, p in model.named_parameters()}
        grads, losses = each(weights, x[i], y[i])
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)
        factor = (1.0 / norms).clamp(max=1.0)
        optimizer.zero_grad()
        for name, p in model.named_parameters():
            total = torch.einsum("i,i...->...", factor, grads[name])
            p.grad = (total + 1.1 * torch.randn_like(total)) / len(i)
        optimizer.step()
        monitor.step(losses.mean(), batch=x[i])
    with torch.no_grad():
        assert (model(test_x).argmax(1) == test_y).float().mean() > 0.85
