"""The gradient of a layer that solves for a fixed point is judged by the implicit gradient, and named if wrong."""

import math

import pytest
import torch
from torch import nn
from torch.autograd import Function

import gradwatch
from gradwatch.errors import GradwatchError

SIZE = 5


def iterated(update, state, tolerance=0.0, most=500):
    """Return the state after enough updates; a tolerance of 0 stands for the precision of the format."""
    tolerance = tolerance or 20 * torch.finfo(state.dtype).eps
    for _ in range(most):
        after = update(state)
        if (after - state).norm() <= tolerance * after.norm():
            return after
        state = after
    return state


ADJOINTS = {
    "right": lambda step, gradient: iterated(lambda w: step(w) + gradient, gradient),
    "skipped-solve": lambda step, gradient: gradient,
    "early-stop": lambda step, gradient: step(step(gradient) + gradient) + gradient,
    "solve-sign": lambda step, gradient: iterated(lambda w: gradient - step(w), gradient),
    "sign": lambda step, gradient: -iterated(lambda w: step(w) + gradient, gradient),
}


class Solve(Function):
    @staticmethod
    def forward(ctx, x, weight, bias, tolerance, adjoint):
        state = iterated(lambda z: torch.tanh(z @ weight.T + bias + x), torch.zeros_like(x), tolerance)
        ctx.save_for_backward(weight, state)
        ctx.adjoint = adjoint
        return state

    @staticmethod
    def backward(ctx, gradient):
        weight, state = ctx.saved_tensors
        slope = 1 - state**2
        if ctx.adjoint == "transposed":
            found = iterated(lambda w: (w @ weight.T) * slope + gradient, gradient)
        else:
            found = ADJOINTS[ctx.adjoint](lambda w: (w * slope) @ weight, gradient)
        product = found * slope
        return product, product.T @ state, product.sum(0), None, None


class Layer(nn.Module):
    def __init__(self, adjoint="right", tolerance=0.0, contraction=0.6):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.empty(SIZE, SIZE))
        nn.init.orthogonal_(self.weight, contraction)
        self.bias = nn.Parameter(0.1 * torch.randn(SIZE))
        self.adjoint, self.tolerance = adjoint, tolerance

    def forward(self, x):
        return Solve.apply(x, self.weight, self.bias, self.tolerance, self.adjoint)

    def cell(self, state, x):
        return torch.tanh(state @ self.weight.T + self.bias + x)


def checked(**options):
    layer = Layer(**options)
    x = torch.randn(6, SIZE, generator=torch.Generator().manual_seed(1), requires_grad=True)
    return gradwatch.check_fixed_point(layer, x, cell=layer.cell)


def test_a_right_layer_is_right_by_three_ways():
    found = checked()

    assert found.verdict == "right"
    assert {g.name for g in found.gradients} == {"weight", "bias", "input0"}
    assert all(max(g.error, g.unrolled) < 1e-8 for g in found.gradients)
    assert all(g.numeric < 1e-5 for g in found.gradients), "5 digits are enough for differences"
    assert found.residual < 1e-5
    assert found.exact_residual < 1e-13


def test_the_contraction_is_that_of_the_jacobian():
    found = checked()

    # the slope of tanh is at most 1, so a matrix with singular values of 0.6 shrinks by that at least
    assert found.contraction <= found.norm <= 0.6
    assert found.iterations == pytest.approx(math.log(2.0**-23) / math.log(found.contraction))


@pytest.mark.parametrize("kind", ["skipped-solve", "early-stop", "solve-sign", "sign", "transposed"])
def test_a_wrong_adjoint_solve_is_named(kind):
    found = checked(adjoint=kind)

    assert found.verdict == "wrong"
    assert found.kind == kind
    assert all(g.unrolled < 1e-8 for g in found.gradients), "the implicit gradient is right nevertheless"


def test_the_number_of_iterations_of_an_early_stop_is_said():
    assert "stops the adjoint solve after 2 iterations" in checked(adjoint="early-stop").text


def test_a_loose_tolerance_is_no_mistake_of_the_gradient():
    found = checked(tolerance=1e-3)

    assert found.verdict == "right"
    assert 1e-5 < found.exact_residual < 1e-3
    assert found.gradients[0].error > 1e-5, "it is off by what the residual explains"


def test_an_output_that_is_not_a_fixed_point_cannot_be_checked():
    layer = Layer()
    x = torch.randn(6, SIZE)

    found = gradwatch.check_fixed_point(layer, x, cell=lambda z, x: layer.cell(z, x) + 0.5)

    assert found.verdict == "cannot tell"
    assert "is not a fixed point" in found.text


def test_a_layer_that_solves_by_newton_where_iterating_diverges_is_right():
    class Root(Function):
        """z = x / z - z ... at z = sqrt(x / 2), where an iteration has the slope -3."""

        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return (x / 2).sqrt()

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            return gradient / (4 * (x / 2).sqrt())

    x = torch.tensor([[1.0], [2.0], [5.0]], requires_grad=True)

    found = gradwatch.check_fixed_point(Root.apply, x, cell=lambda z, x: x / z - z)

    assert found.verdict == "right"
    assert found.contraction == pytest.approx(3.0)
    assert found.iterations == math.inf
    assert math.isnan(found.gradients[0].unrolled)


def test_everything_is_put_back_and_the_result_is_plain_data():
    layer = Layer()
    before = {n: v.clone() for n, v in layer.state_dict().items()}

    data = gradwatch.check_fixed_point(layer, torch.randn(6, SIZE), cell=layer.cell).to_json()

    assert all(torch.equal(v, before[n]) and v.dtype == torch.float32 for n, v in layer.state_dict().items())
    assert layer.weight.grad is None
    assert data["verdict"] == "right"
    assert data["format"] == "float32"


@pytest.mark.parametrize(
    ("layer", "cell", "message"),
    [
        (lambda x: (x, x), lambda z, x: z, "the layer returned tuple"),
        (lambda x: x, lambda z, x: z[:1], r"the cell returned \(1, 5\), expected \(6, 5\)"),
        (lambda x: x.detach(), lambda z, x: z, "a tensor without a graph"),
    ],
)
def test_a_mistake_in_the_call_is_one_clear_error(layer, cell, message):
    with pytest.raises(GradwatchError, match=message):
        gradwatch.check_fixed_point(layer, torch.randn(6, SIZE, requires_grad=True), cell=cell)
