"""Products with Hessian and Jacobian are those of the exact matrices; a wrong derivative is an error."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import gradwatch
from gradwatch.errors import GradwatchError


class Square(torch.autograd.Function):
    """x squared, with a backward that torch can differentiate."""

    factor = 2.0

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * Square.factor * x


class Constant(Square):
    """The same with a backward that leaves the graph."""

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad.detach() * 2 * x.detach()


def quadratic(matrix):
    """Return a model and a loss with this Hessian."""
    model = nn.ParameterDict({"w": torch.ones(len(matrix), dtype=matrix.dtype), "unused": torch.ones(2)})
    return model, lambda: model["w"] @ matrix @ model["w"] / 2


@pytest.fixture
def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double(), torch.randn(6, 3).double()


def random_vector(model):
    return {name: torch.randn_like(p) for name, p in model.named_parameters()}


def test_hvp_multiplies_with_the_hessian():
    matrix = torch.tensor([[2.0, 1.0], [1.0, -3.0]])
    model, loss = quadratic(matrix)

    product = gradwatch.hvp(model, loss, {"w": torch.tensor([1.0, 2.0])})

    torch.testing.assert_close(product["w"], torch.tensor([4.0, -5.0]))
    torch.testing.assert_close(product["unused"], torch.zeros(2))
    assert model["w"].grad is None
    assert not gradwatch.hvp(model, loss, {})["w"].any()


def test_jvp_is_the_derivative_by_forward_mode(network):
    model, x = network
    vector = random_vector(model)

    found = gradwatch.jvp(model, lambda: model(x), vector)

    params = dict(model.named_parameters())
    _, expected = torch.func.jvp(lambda p: torch.func.functional_call(model, p, (x,)), (params,), (vector,))
    torch.testing.assert_close(found, expected)


def test_jvp_needs_no_forward_mode_of_a_function(network):
    model, x = network
    vector = random_vector(model)

    found = gradwatch.jvp(model, lambda: Square.apply(model(x)), vector)

    torch.testing.assert_close(found, 2 * model(x).detach() * gradwatch.jvp(model, lambda: model(x), vector))


def test_jvp_at_a_kink_is_no_mistake():
    model = nn.Linear(2, 3, bias=False)
    nn.init.zeros_(model.weight)
    x = torch.randn(4, 2)

    found = gradwatch.jvp(model, lambda: model(x).relu(), {"weight": torch.ones(3, 2)})

    assert not found.any()  # relu'(0) is 0 in torch


def test_a_function_without_a_right_second_derivative_raises(network):
    model, x = network
    vector = random_vector(model)

    with pytest.raises(GradwatchError, match="hvp: autograd's second derivative of the loss is wrong"):
        gradwatch.hvp(model, lambda: Constant.apply(model(x)).mean(), vector)
    with pytest.raises(GradwatchError, match="jvp: autograd's derivative of the outputs is wrong"):
        gradwatch.jvp(model, lambda: Constant.apply(model(x)), vector)


def test_a_wrong_first_derivative_raises(network, monkeypatch):
    model, x = network
    monkeypatch.setattr(Square, "factor", 4.0)

    with pytest.raises(GradwatchError, match=r"jvp: autograd's derivative .*; gradwatch.check names it"):
        gradwatch.jvp(model, lambda: Square.apply(model(x)), random_vector(model))


def test_a_mistake_in_the_vector_is_named(network):
    model, x = network

    with pytest.raises(GradwatchError, match=r"hvp: there is no trainable parameter '0.wieght'; did you mean"):
        gradwatch.hvp(model, lambda: model(x).mean(), {"0.wieght": torch.ones(4, 3)})
    with pytest.raises(GradwatchError, match=r"jvp: '0.bias' has shape \(3,\), expected \(4,\)"):
        gradwatch.jvp(model, lambda: model(x), {"0.bias": torch.ones(3)})
    with pytest.raises(GradwatchError, match="jvp: the outputs depend on no trainable parameter"):
        gradwatch.jvp(model, lambda: x, {})


def test_the_weights_stay_as_they_were(network):
    model, x = network
    before = {k: v.clone() for k, v in model.state_dict().items()}
    vector = random_vector(model)

    gradwatch.hvp(model, lambda: functional.mse_loss(model(x), x[:, :2]), vector)
    gradwatch.jvp(model, lambda: model(x), vector)

    assert all(torch.equal(model.state_dict()[k], v) for k, v in before.items())
