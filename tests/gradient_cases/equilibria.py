"""Equilibrium layers, whose backward pass solves for the adjoint, rightly and wrongly."""

import torch
from torch import nn
from torch.autograd import grad

from gradient_cases.planting import planted, right

SIZE = 3


def solve(update, state, most=400):
    """Iterate to the precision of the format."""
    for _ in range(most):
        after = update(state)
        if (after - state).norm() <= 20 * torch.finfo(state.dtype).eps * after.norm():
            return after
        state = after
    return state


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.inject = nn.Linear(SIZE, SIZE, bias=False), nn.Linear(4, SIZE, bias=False)
        nn.init.orthogonal_(self.inner.weight, 0.3)

    def forward(self, state, x):
        return torch.tanh(self.inner(state) + self.inject(x))


class Equilibrium(nn.Module):
    """Solves without a graph, and a hook solves for the adjoint."""

    def __init__(self):
        super().__init__()
        self.cell = Cell()

    def forward(self, x):
        with torch.no_grad():
            state = solve(lambda state: self.cell(state, x), torch.zeros(len(x), SIZE, dtype=x.dtype))
        state = self.cell(state, x)
        if state.requires_grad:
            point = state.detach().requires_grad_()
            after = self.cell(point, x)
            state.register_hook(self.hook(lambda adjoint: grad(after, point, adjoint, retain_graph=True)[0]))
        return state

    def hook(self, step):
        def solve_adjoint(gradient):
            return solve(lambda adjoint: step(adjoint) + gradient, gradient)

        return solve_adjoint


class StopsEarly(Equilibrium):
    def hook(self, step):
        def solve_adjoint(gradient):
            return step(step(gradient) + gradient) + gradient  # mistake

        return solve_adjoint


class WithoutAdjoint(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = Cell()

    def forward(self, x):
        with torch.no_grad():
            state = solve(lambda state: self.cell(state, x), torch.zeros(len(x), SIZE, dtype=x.dtype))  # mistake
        return self.cell(state, x)


def squares(outputs):
    return outputs.square().sum(1).mean()


def batch():
    return (torch.randn(8, 4),)


@right
def equilibrium_layer_with_a_hook():
    return Equilibrium(), batch(), squares


@planted("hook", StopsEarly, "solve_adjoint")
def adjoint_solve_that_stops_early():
    return StopsEarly(), batch(), squares


@planted("detach", WithoutAdjoint, "forward")
def equilibrium_layer_without_an_adjoint_solve():
    return WithoutAdjoint(), batch(), squares


class Conditioned(nn.Module):
    """Takes its own estimate, from one pass without a graph, as diffusion models do."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 4)

    def forward(self, x, estimate):
        return torch.tanh(self.net(torch.cat([x, estimate], 1)))


def conditioned_on_itself(model, batch):
    with torch.no_grad():
        estimate = model(batch, torch.zeros_like(batch))
    loss = squares(model(batch, estimate))
    loss.backward()
    return loss.detach()


@right
def estimate_that_is_fed_back_once():
    return conditioned_on_itself, Conditioned(), torch.randn(8, 4)
