"""Functions of one number: an interval that is too long, and cubes that are too large."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.protocol import Attach, case

# ------------------------------------------------------------------------------------ an interval that is too long


def solve_wave(attach: Attach, half: float = 300.0) -> float:
    """Return the mean error from -5 to 5 of the solution of y + y''/2 = 0 with y(0) = 1 and y'(0) = 0."""
    torch.manual_seed(271)
    net = nn.Sequential(
        nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 1)
    )
    for module in net:
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
    points = torch.linspace(-half, half, 1000)[:, None].requires_grad_()
    zero = torch.zeros(1, 1, requires_grad=True)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    monitor = attach(net, optimizer)

    def derivative(y: Tensor, x: Tensor) -> Tensor:
        return torch.autograd.grad(y.sum(), x, create_graph=True)[0]

    for _ in range(400):
        y = net(points)
        residual = y + 0.5 * derivative(derivative(y, points), points)
        start = net(zero)
        loss = (residual**2).mean() + ((start - 1) ** 2).mean() + (derivative(start, zero) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=points)
    x = torch.linspace(-5, 5, 200)[:, None]
    with torch.no_grad():
        return (net(x) - (math.sqrt(2) * x).cos()).abs().mean().item()


@case(
    fault="saturated-activation",
    also=("loss-plateau", "poor-initialization"),
    tolerate=("constant-batch", "vanishing-gradient", "learning-rate-too-low"),
    onset=0,
    source="https://github.com/lululxvi/deepxde/issues/321",
    tags=("equation", "data"),
)
def wave_over_a_long_interval(attach: Attach) -> None:
    """The interval is -300 to 300 and is not scaled: nearly all points are in the flat tails of the first tanh. The
    network finds y = 0 with a spike at 0. The loss falls to 0.003, and the mean error near 0 is 0.67 of a wave of
    amplitude 1. https://github.com/lululxvi/deepxde/issues/794 shows that the scale is the cause.
    """
    solve_wave(attach)


# ------------------------------------------------------------------------------------ cubes that are too large


def fit_cubes(attach: Attach) -> float:
    """Return the mean error of the cubes, as a share of their mean."""
    torch.manual_seed(272)
    model = nn.Sequential(nn.Linear(1, 50), nn.ReLU(), nn.Linear(50, 1))
    x = torch.arange(1.0, 4000.0)[:, None]
    y = x**3
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.MSELoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for _ in range(400):
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x)
    with torch.no_grad():
        return (F.l1_loss(model(x), y) / y.mean()).item()


@case(
    fault="exploding-gradient",
    also=("loss-plateau", "learning-rate-too-low", "poor-initialization"),
    tolerate=("constant-batch", "layer-imbalance"),
    onset=0,
    source="https://discuss.pytorch.org/t/neural-network-could-not-learn-on-this-type-of-data-why/96648",
    tags=("regression", "data"),
)
def cubes_of_large_numbers(attach: Attach) -> None:
    """A network shall learn the cubes of 1 to 3999, neither of which is normalized. The loss is 5.8477e20 at the start
    and at the end: steps of 0.001 are nothing for targets of up to 6e10.
    """
    fit_cubes(attach)
