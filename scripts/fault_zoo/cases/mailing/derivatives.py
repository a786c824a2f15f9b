"""Derivatives that the script asks for, or writes itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from scripts.fault_zoo.cases.mailing.material import digits, draws, mean_of_last
from scripts.fault_zoo.protocol import Attach, case

# ------------------------------------------------------------------------------------- a derivative without its graph


def slope(of: Tensor, at: Tensor, *, create_graph: bool) -> Tensor:
    (found,) = torch.autograd.grad(of.sum(), at, create_graph=create_graph, retain_graph=True)
    return found


def train_oscillator(attach: Attach, *, repaired: bool) -> float:
    """Solve u'' + 0.3 u' + 2 u = 0, u(0) = 1, u'(0) = 0. Return the largest error on four seconds."""
    torch.manual_seed(1001)
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    monitor = attach(model, optimizer)
    for _ in range(400):
        t = (4 * torch.rand(64, 1)).requires_grad_()
        u = model(t)
        u_t = slope(u, t, create_graph=True)
        u_tt = slope(u_t, t, create_graph=repaired)
        equation = (u_tt + 0.3 * u_t + 2 * u).square().mean()
        zero = torch.zeros(1, 1, requires_grad=True)
        start = model(zero)
        begin = (start - 1).square().mean() + slope(start, zero, create_graph=True).square().mean()
        loss = equation + 10 * begin
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=t)
    t = torch.linspace(0, 4, 200)[:, None]
    rate = (2 - 0.15**2) ** 0.5
    exact = (-0.15 * t).exp() * ((rate * t).cos() + 0.15 / rate * (rate * t).sin())
    with torch.no_grad():
        return (model(t) - exact).abs().max().item()


@case(
    fault="loss-plateau",
    also=("no-gradient", "oscillating-gradient"),
    tolerate=("learning-rate-too-high", "gradient-spike"),
    onset=0,
    source="https://github.com/facebookresearch/DomainBed/issues/50",
    tags=("physics",),
)
def second_derivative_without_graph(attach: Attach) -> None:
    """The last derivative of a physics-informed loss is computed without `create_graph=True`, so that it is a constant
    to the optimizer, and the equation is not solved. The same mistake in a penalty on gradients is reported in
    https://github.com/facebookresearch/DomainBed/issues/50. A term of the loss has no gradient, though all parameters
    have one from other terms; what is seen is a loss that bounces and does not come down.
    """
    train_oscillator(attach, repaired=False)


@case(source="the repaired twin of `second_derivative_without_graph`: create_graph=True", tags=("physics", "twin"))
def second_derivative_with_graph(attach: Attach) -> None:
    """All derivatives of the equation keep their graphs."""
    assert train_oscillator(attach, repaired=True) < 0.15


# -------------------------------------------------------------------------------------- a backward that does not listen


class TotalScore(torch.autograd.Function):
    """The logarithm of the sum of the exponentials of the scores of all paths, (batch, paths) to (batch,)."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, listens: bool) -> Tensor:
        total = scores.logsumexp(1)
        ctx.save_for_backward((scores - total[:, None]).exp())
        ctx.listens = listens
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (shares,) = ctx.saved_tensors
        return (shares * grads[0][:, None] if ctx.listens else shares), None


def train_paths(attach: Attach, *, repaired: bool) -> float:
    """Tell odd from even digits; each has five paths. Return the mean loss of the last 20 steps."""
    torch.manual_seed(1002)
    x, y, _, _ = digits()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    monitor = attach(model, optimizer)
    losses = []
    for i in draws(len(x), size=48, steps=200):
        scores = model(x[i])
        wrong = torch.arange(10)[None] % 2 != y[i, None] % 2
        right = TotalScore.apply(scores.masked_fill(wrong, -1e4), repaired)
        loss = -(right - TotalScore.apply(scores, repaired)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
        losses.append(loss.item())
    return mean_of_last(losses)


@case(
    fault="loss-plateau",
    also=("exploding-gradient", "learning-rate-too-high"),
    onset=0,
    source="https://github.com/k2-fsa/k2/issues/341",
    tags=("custom-function", "speech"),
)
def backward_that_does_not_listen(attach: Attach) -> None:
    """A custom function returns its derivative without the gradient of its output, so that the sign of one of two terms
    is wrong and the loss rises. Reported in https://github.com/k2-fsa/k2/issues/341; the same mistake is in
    https://github.com/pytorch/pytorch/issues/995. No kind says that a gradient is wrong; a loss that has not fallen
    since the run began is what is seen.
    """
    train_paths(attach, repaired=False)
