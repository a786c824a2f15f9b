"""The sharpest curvature is the exact Hessian's largest eigenvalue, measuring it leaves nothing behind, and a second
derivative that autograd lacks or gets wrong is an error instead of a number.
"""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from gradwatch.errors import GradwatchError
from gradwatch.probe.hessian.curvature import Curvature, curvature


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


@pytest.mark.parametrize("tolerance", [1e-1, 1e-2, 1e-9])
def test_it_is_the_largest_eigenvalue_of_the_exact_hessian_within_the_error(tolerance):
    model, (x, y) = network(), batch()

    found = curvature(model, lambda: functional.cross_entropy(model(x), y), tolerance=tolerance)

    largest = float(torch.linalg.eigvalsh(exact(model, x, y))[-1])
    assert found.converged
    assert abs(found.sharpness - largest) <= found.error <= tolerance * abs(found.sharpness)
    assert found.largest_rate == pytest.approx(2 / found.sharpness)


def diagonal(*curvatures):
    """A model, and a loss whose Hessian has these eigenvalues."""
    model = nn.ParameterDict({str(i): torch.ones(3, dtype=torch.float64) for i in range(len(curvatures))})
    return model, lambda: sum(c * p.square().sum() / 2 for c, p in zip(curvatures, model.values(), strict=True))


def test_a_direction_that_bends_down_more_than_any_bends_up_does_not_hide_the_largest_rate():
    found = curvature(*diagonal(-1000.0, 2.0, 1.0, 0.0), tolerance=1e-6)

    assert found.sharpness == pytest.approx(2.0)
    assert found.largest_rate == pytest.approx(1.0)


def test_a_loss_that_bends_down_in_every_direction_limits_no_rate():
    found = curvature(*diagonal(-3.0, -1.0), tolerance=1e-6)

    assert found.sharpness == pytest.approx(-1.0)
    assert found.largest_rate == math.inf


def test_the_number_of_products_is_counted_and_bounded():
    model, (x, y) = network(), batch()
    calls = []
    handle = model[0].weight.register_hook(calls.append)  # runs once in each product and each gradient

    found = curvature(model, lambda: functional.cross_entropy(model(x), y), max_products=5, tolerance=0.0)

    handle.remove()
    largest = float(torch.linalg.eigvalsh(exact(model, x, y))[-1])
    gradients = 1 + 2  # of the loss, and at the two shifted weights
    assert found.products == len(calls) - gradients == 5
    assert not found.converged
    assert abs(found.sharpness - largest) <= found.error


def test_fewer_products_than_a_measurement_needs_are_refused():
    with pytest.raises(GradwatchError, match="max_products is 2, expected at least 3"):
        curvature(*diagonal(1.0), max_products=2)


def test_gradient_descent_diverges_just_above_the_largest_rate_and_converges_just_below():
    torch.manual_seed(0)
    x = torch.randn(50, 4).double() @ torch.diag(torch.tensor([5.0, 1.0, 1.0, 0.2]).double())
    y = x.sum(1, keepdim=True)

    def final(factor):
        torch.manual_seed(1)
        model = nn.Linear(4, 1, bias=False).double()
        bound = curvature(model, lambda: functional.mse_loss(model(x), y), tolerance=1e-12).largest_rate
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


def test_a_rate_within_the_error_bar_is_too_close_to_tell():
    found = Curvature(sharpness=2.0, error=0.5, products=40, converged=False, loss=1.0)

    # 2 / 2.5 = 0.8 and 2 / 1.5 = 1.33
    assert "0.79 is within it" in found.verdict(0.79)
    assert "0.81 is too close to it to tell" in found.verdict(0.81)
    assert "1.33 is too close to it to tell" in found.verdict(1.33)
    assert "1.34 is above it" in found.verdict(1.34)


def test_its_text_and_its_verdict_show_the_error_bar_and_a_measurement_that_has_not_converged():
    done = Curvature(sharpness=12.34, error=0.056, products=9, converged=True, loss=1.0)
    stopped = Curvature(sharpness=12.34, error=3.0, products=40, converged=False, loss=1.0)

    assert str(done) == "sharpest curvature 12.3 +/- 0.06 (9 products with the Hessian, converged)"
    assert str(stopped).endswith("(40 products with the Hessian, not converged: raise max_products)")
    assert done.verdict(0.1).startswith("the sharpest curvature is 12.3 +/- 0.06: steps")
    assert stopped.verdict(0.1).startswith("the sharpest curvature is 12.3 +/- 3 (not converged): steps")


def test_a_loss_that_is_nan_is_refused():
    model, (x, y) = network(), batch()

    with pytest.raises(GradwatchError, match="the loss is nan, expected a finite number"):
        curvature(model, lambda: functional.cross_entropy(model(x), y) * math.nan)


def test_a_second_derivative_that_is_not_finite_is_an_error():
    model = nn.ParameterDict({"weight": torch.zeros(3)})

    # the gradient of |w|^1.5 at 0 is 0, its second derivative is infinite
    with pytest.raises(GradwatchError, match="second derivative of the loss is not finite at these weights"):
        curvature(model, lambda: model["weight"].abs().pow(1.5).sum())


def test_complex_parameters_are_refused():
    model = nn.ParameterDict({"weight": torch.ones(3, dtype=torch.complex64)})

    with pytest.raises(GradwatchError, match=r"a parameter has dtype torch\.complex64, expected real parameters"):
        curvature(model, lambda: model["weight"].abs().square().sum())


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.projection = nn.Linear(8, 24)

    def forward(self, x):
        return functional.scaled_dot_product_attention(*self.projection(x)[None].chunk(3, -1))


def test_fused_attention_is_refused_and_the_way_out_of_the_message_works():
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(2, 5, 8)

    def loss(backend):
        with sdpa_kernel(backend):
            return model(x).square().mean()

    with pytest.raises(GradwatchError, match=r"no second derivative: .*flash.*SDPBackend\.MATH"):
        curvature(model, lambda: loss(SDPBackend.FLASH_ATTENTION))

    assert curvature(model, lambda: loss(SDPBackend.MATH)).converged


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_error_bar_covers_the_rounding_of_half_precision(dtype):
    model, (x, y) = network(), batch()
    exact_largest = float(torch.linalg.eigvalsh(exact(model, x, y))[-1])
    model.to(dtype)

    found = curvature(model, lambda: functional.cross_entropy(model(x.to(dtype)), y))

    # rounding the weights changes the eigenvalue itself, by a few epsilons
    assert abs(found.sharpness - exact_largest) <= found.error + 4 * torch.finfo(dtype).eps * exact_largest


class Detached(torch.autograd.Function):
    """Softplus with a backward outside the graph."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return functional.softplus(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return (grad * torch.sigmoid(x)).detach()


class DetachedInput(Detached):
    """Only the gradient of the output stays in the graph: the second derivative of softplus itself is lost."""

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * torch.sigmoid(x.detach())


class InNumpy(Detached):
    """Computes its backward with NumPy."""

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        slope = 1 / (1 + np.exp(-x.detach().numpy()))
        return torch.from_numpy(grad.detach().numpy() * slope)


class OnceDifferentiable(Detached):
    """Is marked, but PyTorch raises only where the path to the weights passes the mark."""

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * torch.sigmoid(x)


class Slope(torch.autograd.Function):
    """The gradient of softplus, with a derivative that is twice too large."""

    @staticmethod
    def forward(ctx, x, grad):
        ctx.save_for_backward(x, grad)
        return grad * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, above):
        x, grad = ctx.saved_tensors
        slope = torch.sigmoid(x)
        return 2 * above * grad * slope * (1 - slope), above * slope


class WrongDoubleBackward(Detached):
    """A right backward, whose own backward is wrong."""

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return Slope.apply(x, grad)


WITHOUT_SECOND_DERIVATIVE = [Detached, DetachedInput, InNumpy, OnceDifferentiable, WrongDoubleBackward]


class RightDoubleBackward(Detached):
    """A custom Function as it ought to be."""

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * torch.sigmoid(x)


class Custom(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function.apply(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("function", WITHOUT_SECOND_DERIVATIVE)
def test_a_custom_function_with_a_missing_or_wrong_second_derivative_is_an_error(function, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 1), Custom(function)).to(dtype)
    x = torch.randn(7, 3, dtype=dtype)
    weights = [p.clone() for p in model.parameters()]

    with pytest.raises(GradwatchError, match="autograd's second derivative of the loss is wrong") as caught:
        curvature(model, lambda: model(x).mean())

    assert "write that backward with differentiable torch operations" in str(caught.value)
    assert all(torch.equal(p, before) for p, before in zip(model.parameters(), weights, strict=True))


@pytest.mark.parametrize("function", WITHOUT_SECOND_DERIVATIVE)
def test_one_such_function_within_a_network_is_an_error_too(function):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), Custom(function), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    x, y = batch()

    with pytest.raises(GradwatchError, match="autograd's second derivative of the loss is wrong"):
        curvature(model, lambda: functional.cross_entropy(model(x), y))


def test_a_gradient_outside_the_graph_beside_a_true_one_is_an_error():
    model = nn.ParameterDict({"smooth": torch.ones(4), "custom": torch.ones(4)})

    with pytest.raises(GradwatchError, match="autograd's second derivative of the loss is wrong"):
        curvature(model, lambda: (model["smooth"] ** 2).sum() / 10 + Detached.apply(model["custom"]).sum())


def test_an_operation_whose_second_derivative_torch_does_not_implement_is_named():
    model = nn.Linear(3, 4)

    with pytest.raises(GradwatchError, match=r"no second derivative: .*multi_margin_loss_backward"):
        curvature(model, lambda: functional.multi_margin_loss(model(torch.ones(5, 3)), torch.arange(5) % 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_custom_function_with_a_right_second_derivative_is_measured(dtype):
    torch.manual_seed(0)
    custom = nn.Sequential(nn.Linear(3, 8), Custom(RightDoubleBackward), nn.Linear(8, 2)).to(dtype)
    plain = nn.Sequential(custom[0], nn.Softplus(), custom[2])
    x, y = batch()

    found = curvature(custom, lambda: functional.cross_entropy(custom(x.to(dtype)), y))

    expected = curvature(plain, lambda: functional.cross_entropy(plain(x.to(dtype)), y))
    assert found.sharpness == pytest.approx(expected.sharpness, rel=1e-4)


def test_a_linear_model_with_a_linear_loss_is_called_linear():
    model = nn.Linear(3, 2)

    with pytest.raises(GradwatchError, match="linear in every parameter"):
        curvature(model, lambda: model(torch.ones(5, 3)).sum())


def test_a_loss_that_is_linear_on_either_side_of_its_kinks_has_no_curvature():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU())
    x = torch.randn(64, 20)

    assert curvature(model, lambda: model(x).mean()).largest_rate == float("inf")


def mlp():
    return nn.Sequential(nn.Linear(36, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))


def cnn():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.3),
        nn.Flatten(),
        nn.Linear(32, 4),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [4, 128])
@pytest.mark.parametrize("make", [mlp, cnn])
@pytest.mark.parametrize("loss", [functional.cross_entropy, functional.l1_loss, functional.mse_loss])
@pytest.mark.parametrize("steps", [0, 30])
def test_networks_with_kinks_dropout_and_normalisation_raise_no_alarm(make, size, dtype, loss, steps):
    torch.manual_seed(0)
    model = make().to(dtype)
    x = torch.randn(size, 1, 6, 6, dtype=dtype)
    x = x.flatten(1) if make is mlp else x
    y = torch.randint(4, (size,))
    y = y if loss is functional.cross_entropy else functional.one_hot(y, 4).to(dtype)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()

    assert math.isfinite(curvature(model, lambda: loss(model(x), y)).sharpness)


def test_the_loss_is_called_each_time_with_the_same_buffers_and_randomness():
    torch.manual_seed(0)
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(3, 8)), nn.BatchNorm1d(8), nn.Linear(8, 2))
    x, y = batch()
    seen = []

    def loss():
        seen.append((torch.rand(1).item(), *(float(b.double().sum()) for b in model.buffers())))
        return functional.cross_entropy(model(x.float()), y)

    curvature(model, loss)

    assert len(seen) > 1
    assert len(set(seen)) == 1


def test_a_graph_that_somebody_still_needs_stays_usable():
    model, (x, y) = network(), batch()
    pending = functional.cross_entropy(model(x), y)

    curvature(model, lambda: functional.cross_entropy(model(x), y))

    pending.backward()
    assert model[0].weight.grad is not None


def test_a_loss_that_was_computed_before_is_an_error():
    model, (x, y) = network(), batch()
    value = functional.cross_entropy(model(x), y)

    with pytest.raises(GradwatchError, match="check that `loss` computes the loss from the weights at each call"):
        curvature(model, lambda: value)


def test_a_loss_that_bends_within_less_than_a_step_of_the_differences_raises_no_alarm():
    model = nn.ParameterDict({"sharp": torch.zeros(3), "smooth": torch.ones(4)})

    found = curvature(model, lambda: (model["sharp"] ** 2 + 1e-12).sqrt().sum() + (model["smooth"] ** 2).sum())

    assert found.sharpness == pytest.approx(1e6, rel=1e-3)
