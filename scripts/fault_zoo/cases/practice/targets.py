"""Outputs and targets that do not fit the loss."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.practice.processes import blobs
from scripts.fault_zoo.cases.reports.material import digits, indices
from scripts.fault_zoo.protocol import Attach, case

# -------------------------------------------------------------------------------------------- two sigmoids in a row


def train_masks(attach: Attach, *, repaired: bool) -> float:
    """Return the Dice coefficient of the shapes found in new images."""
    torch.manual_seed(0)
    x, mask = blobs(400)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 5, padding=2),
        nn.ReLU(),
        nn.Conv2d(8, 8, 5, padding=2),
        nn.ReLU(),
        nn.Conv2d(8, 1, 1),
        nn.Identity() if repaired else nn.Sigmoid(),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loss_fn = nn.BCEWithLogitsLoss()
    monitor = attach(model, optimizer, loss_fn=loss_fn)
    chosen = indices(len(x), 8)
    for _ in range(160):
        i = next(chosen)
        loss = loss_fn(model(x[i]), mask[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
    x, mask = blobs(60, seed=9)
    with torch.no_grad():
        found = (model(x) > (0.0 if repaired else 0.5)).float()
    return (2 * (found * mask).sum() / (found.sum() + mask.sum()).clamp(min=1)).item()


@case(
    fault="probabilities-into-loss",
    onset=0,
    tolerate=("loss-plateau",),
    source="https://github.com/avBuffer/UNet3plus_pth/issues/23",
    tags=("segmentation", "conv"),
)
def masks_with_two_sigmoids(attach: Attach) -> None:
    """A network for masks ends in a sigmoid, and so does the loss, which cannot fall below that of a guess for the
    background. Reported in https://github.com/avBuffer/UNet3plus_pth/issues/23.
    """
    train_masks(attach, repaired=False)


# --------------------------------------------------------------------------------- a divergence of probabilities


def train_student(attach: Attach, *, repaired: bool) -> float:
    """Return the divergence of the student from the teacher on test digits."""
    torch.manual_seed(0)
    x, y, test_x, _ = digits()
    teacher = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10))
    optimizer = torch.optim.Adam(teacher.parameters(), lr=3e-3)
    chosen = indices(len(x), 64)
    for _ in range(200):
        i = next(chosen)
        optimizer.zero_grad()
        F.cross_entropy(teacher(x[i]), y[i]).backward()
        optimizer.step()
    student = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
    monitor = attach(student, optimizer, loss_fn=F.kl_div)
    warmth = 3.0
    for _ in range(400):
        i = next(chosen)
        with torch.no_grad():
            wanted = F.softmax(teacher(x[i]) / warmth, 1)
        out = student(x[i]) / warmth
        out = F.log_softmax(out, 1) if repaired else F.softmax(out, 1)
        loss = warmth**2 * F.kl_div(out, wanted, reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
    with torch.no_grad():
        wanted, out = F.softmax(teacher(test_x) / warmth, 1), F.log_softmax(student(test_x) / warmth, 1)
    return F.kl_div(out, wanted, reduction="batchmean").item()


@case(
    fault="probabilities-into-loss",
    onset=0,
    source="https://github.com/microsoft/ProDA/issues/43",
    tags=("distillation", "digits"),
)
def divergence_of_probabilities(attach: Attach) -> None:
    """A student follows a teacher; `kl_div` is given the student's probabilities and expects their logarithms, so that
    the student is drawn to certainty. Reported in https://github.com/microsoft/ProDA/issues/43.
    """
    train_student(attach, repaired=False)


@case(
    source="the repaired twin of `divergence_of_probabilities`: the loss gets logarithms",
    tags=("distillation", "digits"),
)
def divergence_of_logarithms(attach: Attach) -> None:
    """A student follows the soft outputs of a teacher and sees no label."""
    assert train_student(attach, repaired=True) < 0.05


# ---------------------------------------------------------------------------------------- targets that are broadcast


class Forecaster(nn.Module):
    """Read 12 months and say the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(1, 24, batch_first=True)
        self.head = nn.Linear(24, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(x)[0][:, -1])


def sunspots(months: int) -> Tensor:
    """Return a noisy cycle of about 11 years whose height changes, with a deviation of 1."""
    generator = torch.Generator().manual_seed(1)
    state, values = torch.tensor([1.0, 0.0]), []
    cos, sin = math.cos(2 * math.pi / 48), math.sin(2 * math.pi / 48)
    rotation = torch.tensor([[cos, -sin], [sin, cos]])
    for _ in range(months):
        state = 0.99 * rotation @ state + 0.12 * torch.randn(2, generator=generator)
        values.append(state[0])
    series = torch.stack(values)
    return (series - series.mean()) / series.std()


def train_forecast(attach: Attach, *, repaired: bool) -> float:
    """Return the squared error on the last months, as a fraction of their variance."""
    torch.manual_seed(0)
    rows = sunspots(1600).unfold(0, 13, 1)
    x, y = rows[:, :12, None], rows[:, 12]
    model = Forecaster()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    monitor = attach(model, optimizer, loss_fn=F.mse_loss)
    chosen = indices(1200, 32)
    for _ in range(300):
        i = next(chosen)
        out = model(x[i])
        loss = F.mse_loss(out, y[i].view_as(out) if repaired else y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
    with torch.no_grad():
        return (F.mse_loss(model(x[1220:]).squeeze(1), y[1220:]) / y[1220:].var()).item()


@case(
    fault="loss-plateau",
    onset=0,
    source="https://github.com/jsboige/CoursIA/pull/926",
    tags=("time-series", "regression"),
)
def forecast_of_each_for_all(attach: Attach) -> None:
    """Outputs of shape (32, 1) and targets of shape (32,) are broadcast, so that each output is compared with all
    targets, and the best output is their mean. Reported in https://github.com/jsboige/CoursIA/pull/926.
    """
    train_forecast(attach, repaired=False)


@case(
    source="the repaired twin of `forecast_of_each_for_all`: the targets have the shape of the outputs",
    tags=("time-series", "regression"),
)
def forecast_of_each(attach: Attach) -> None:
    """A recurrent network forecasts a noisy cycle."""
    assert train_forecast(attach, repaired=True) < 0.2


# ------------------------------------------------------------------------------------ an equation through ReLU units


def train_equation(attach: Attach, *, repaired: bool) -> float:
    """Return the squared error of the solution, as a fraction of its variance."""
    torch.manual_seed(0)
    unit = nn.Tanh if repaired else nn.ReLU
    model = nn.Sequential(nn.Linear(1, 32), unit(), nn.Linear(32, 32), unit(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    monitor = attach(model, optimizer)
    ends = torch.tensor([[0.0], [1.0]])
    for _ in range(500):
        x = torch.rand(48, 1, requires_grad=True)
        u = model(x)
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (bend,) = torch.autograd.grad(slope.sum(), x, create_graph=True, materialize_grads=True)
        load = (2 * torch.pi) ** 2 * torch.sin(2 * torch.pi * x)
        loss = ((bend + load) ** 2).mean() / 100 + 10 * (model(ends) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x.detach())
    x = torch.linspace(0, 1, 80)[:, None]
    exact = torch.sin(2 * torch.pi * x)
    with torch.no_grad():
        return (F.mse_loss(model(x), exact) / exact.var()).item()


@case(
    fault="loss-plateau",
    also=("no-gradient", "dead-layer"),
    onset=0,
    source="https://github.com/ComputationalDomain/PINNs/issues/1",
    tags=("pinn",),
)
def equation_through_relu(attach: Attach) -> None:
    """A network shall solve Poisson's equation. Its units are ReLU, whose second derivative is zero, so that the
    residual of the equation is constant and only the ends are learned. Reported in
    https://github.com/ComputationalDomain/PINNs/issues/1.
    """
    train_equation(attach, repaired=False)


@case(source="the repaired twin of `equation_through_relu`: the units are tanh", tags=("pinn",))
def equation_through_tanh(attach: Attach) -> None:
    """A network solves Poisson's equation; the loss has no data, only second derivatives."""
    assert train_equation(attach, repaired=True) < 0.1
