"""The sharpest curvature is the exact Hessian's largest eigenvalue, and measuring it leaves nothing behind."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from gradwatch.errors import GradwatchError
from gradwatch.probe.curvature import curvature


def network(*, dropout=0.0):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Dropout(dropout), nn.Linear(5, 2)).double()


def batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(7, 3, generator=generator).double(), torch.randint(2, (7,), generator=generator)


def exact(model, x, y):
    """The whole Hessian, entry by entry."""
    names = [name for name, _ in model.named_parameters()]
    shapes = [p.shape for p in model.parameters()]
    sizes = [p.numel() for p in model.parameters()]

    def loss(flat):
        parts = {n: v.view(s) for n, v, s in zip(names, flat.split(sizes), shapes, strict=True)}
        return functional.cross_entropy(torch.func.functional_call(model, parts, (x,)), y)

    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    return torch.autograd.functional.hessian(loss, flat)


def test_it_is_the_largest_eigenvalue_of_the_exact_hessian():
    model, (x, y) = network(), batch()

    found = curvature(model, lambda: functional.cross_entropy(model(x), y), iterations=500, tolerance=1e-9)

    eigenvalues = torch.linalg.eigvalsh(exact(model, x, y))
    assert found.sharpness == pytest.approx(float(eigenvalues[eigenvalues.abs().argmax()]), rel=1e-6)
    assert found.largest_rate == pytest.approx(2 / found.sharpness)


def test_gradient_descent_diverges_just_above_the_largest_rate_and_converges_just_below():
    torch.manual_seed(0)
    x = torch.randn(50, 4).double() @ torch.diag(torch.tensor([5.0, 1.0, 1.0, 0.2]).double())
    y = x.sum(1, keepdim=True)

    def final(factor):
        torch.manual_seed(1)
        model = nn.Linear(4, 1, bias=False).double()
        bound = curvature(model, lambda: functional.mse_loss(model(x), y), iterations=500, tolerance=1e-12).largest_rate
        optimizer = torch.optim.SGD(model.parameters(), lr=factor * bound)
        for _ in range(400):
            optimizer.zero_grad()
            loss = functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
        return loss.item()

    assert final(0.95) < 1e-1
    assert final(1.05) > 1e6


def test_it_leaves_gradients_buffers_modes_and_randomness_as_they_were():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    x, y = torch.randn(8, 3), torch.randint(2, (8,))
    functional.cross_entropy(model(x), y).backward()
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    same = {name: p.grad for name, p in model.named_parameters()}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(9)
    expected = torch.rand(3)

    torch.manual_seed(9)
    curvature(model, lambda: functional.cross_entropy(model(x), y))

    assert torch.equal(torch.rand(3), expected)
    for name, p in model.named_parameters():
        assert p.grad is same[name]
        assert torch.equal(p.grad, before[name])
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert model.training


def test_it_is_the_same_every_time_with_dropout_too():
    model, (x, y) = network(dropout=0.5), batch()

    def measure():
        torch.manual_seed(4)
        return curvature(model, lambda: functional.cross_entropy(model(x), y))

    assert measure() == measure()


def test_parameters_that_the_loss_does_not_reach_are_left_out():
    model, (x, y) = network(), batch()
    model.register_module("unused", nn.Linear(2, 2).double())

    assert curvature(model, lambda: functional.cross_entropy(model[:4](x), y)).sharpness > 0


def test_a_loss_without_a_graph_is_refused():
    model, (x, y) = network(), batch()

    with pytest.raises(GradwatchError, match="depends on no trainable parameter"):
        curvature(model, lambda: functional.cross_entropy(model(x), y).detach())


def test_the_verdict_says_on_which_side_of_the_bound_a_rate_is():
    model, (x, y) = network(), batch()
    found = curvature(model, lambda: functional.cross_entropy(model(x), y))

    assert "above it, by a factor of 10" in found.verdict(10 * found.largest_rate)
    assert "within it, by a factor of 4" in found.verdict(found.largest_rate / 4)
