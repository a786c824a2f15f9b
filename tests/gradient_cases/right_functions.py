"""Right custom Functions, and Functions that differ on purpose and say so."""

from __future__ import annotations

import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from gradient_cases.planting import right
from gradient_cases.wrong_functions import Dense, GainLayer, applied, squares
from gradient_cases.wrong_patterns import Turned


class Relu(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp_min(0)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x > 0)


@right
def relu_function_on_zeros():
    x = torch.randn(6, 4)
    x[:3] = 0
    net = applied(Relu)[0]
    nn.init.zeros_(net.first.bias)
    return net, (x,), squares


class DenseFunction(Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return x @ weight.t() + bias

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x, grad.sum(0)


@right
def dense_function():
    return Dense(DenseFunction), (torch.randn(8, 4, requires_grad=True),), squares


class ExpFunction(Function):
    @staticmethod
    def forward(x):
        return x.exp()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return grad * y


@right
def function_with_setup_context():
    return applied(ExpFunction)


@right
def function_of_a_transposed_input():
    return Turned(ExpFunction), (torch.randn(6, 4),), lambda out: out.sin().sum()


@right
def function_with_an_expanded_gradient():
    return Turned(ExpFunction), (torch.randn(6, 4),), lambda out: out.sum()


class InPlace(Function):
    @staticmethod
    def forward(ctx, x):
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


class DoublesInPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 5)

    def forward(self, x):
        return InPlace.apply(self.first(x) * 1)


@right
def function_that_works_in_place():
    return DoublesInPlace(), (torch.randn(6, 4),), squares


class RoundThrough(Function):
    deliberate = True

    @staticmethod
    def forward(ctx, x):
        return torch.round(4 * x) / 4

    @staticmethod
    def backward(ctx, grad):
        return grad


@right
def straight_through_rounding():
    return applied(RoundThrough)


class SignThrough(Function):
    deliberate = True

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x.abs() <= 1)


class BinaryNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.out = nn.Parameter(torch.randn(5, 4)), nn.Linear(5, 2)

    def forward(self, x):
        hidden = x @ SignThrough.apply(self.weight).t()
        return self.out(SignThrough.apply(hidden) + hidden)


@right
def network_with_binary_weights():
    return BinaryNet(), (torch.randn(6, 4),), squares


class Reverse(Function):
    deliberate = True

    @staticmethod
    def forward(ctx, x, strength):
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.strength * grad, None


@right
def reversed_gradient_of_a_domain():
    return applied(Reverse, 0.3)


class CubeTwice(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 3 * x**2


class SlopePenalty(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 1)

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            out = self.second(CubeTwice.apply(self.first(x)))
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.mean() + slope.pow(2).sum(-1).mean()


@right
def penalty_of_the_slope_through_a_function():
    return SlopePenalty(), (torch.randn(5, 4),), lambda out: out


class FixedPoint(Function):
    @staticmethod
    def forward(ctx, weight, x):
        z = torch.zeros_like(x)
        for _ in range(200):
            z = torch.tanh(z @ weight.t() + x)
        ctx.save_for_backward(weight, z)
        return z

    @staticmethod
    def backward(ctx, grad):
        weight, z = ctx.saved_tensors
        slope = 1 - z**2
        u = grad
        for _ in range(200):
            u = grad + (u * slope) @ weight
        return (u * slope).t() @ z, u * slope


class Implicit(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.inject = nn.Parameter(0.2 * torch.randn(4, 4)), nn.Linear(3, 4)

    def forward(self, x):
        return FixedPoint.apply(self.weight, self.inject(x))


@right
def implicit_layer():
    return Implicit(), (torch.randn(5, 3),), squares


class NumpyCube(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.from_numpy(x.detach().numpy() ** 3)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 3 * x**2


@right
def function_that_calls_numpy():
    return applied(NumpyCube)


class NoisyDrop(Function):
    @staticmethod
    def forward(ctx, x):
        mask = (torch.rand_like(x) > 0.4).to(x.dtype) / 0.6
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx, grad):
        (mask,) = ctx.saved_tensors
        return grad * mask


@right
def dropout_function():
    return applied(NoisyDrop)


class MaxOfRow(Function):
    @staticmethod
    def forward(ctx, x):
        top, at = x.max(-1)
        ctx.save_for_backward(at)
        ctx.shape = x.shape
        ctx.mark_non_differentiable(at)
        return top, at

    @staticmethod
    def backward(ctx, grad, _):
        (at,) = ctx.saved_tensors
        return torch.zeros(ctx.shape, dtype=grad.dtype).scatter(-1, at[:, None], grad[:, None])


@right
def function_with_an_integer_output():
    return nn.Linear(4, 5), (torch.randn(6, 4),), lambda out: MaxOfRow.apply(out)[0].sum()


class GainFunction(Function):
    @staticmethod
    def forward(ctx, x, gain):
        ctx.save_for_backward(x, gain)
        return x * gain

    @staticmethod
    def backward(ctx, grad):
        x, gain = ctx.saved_tensors
        return grad * gain, (grad * x).sum(0) if ctx.needs_input_grad[1] else None


@right
def frozen_gain():
    layer = GainLayer(GainFunction)
    layer.gain.requires_grad_(False)
    return nn.Sequential(nn.Linear(4, 4), layer), (torch.randn(5, 4),), squares


def step_per_sample(model, batch):
    x, y = batch
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights, sample, target):
        return (functional_call(model, weights, (sample,)) - target).pow(2).mean()

    each = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(weights, x, y)
    for name, p in model.named_parameters():
        p.grad = each[name].mean(0)
    return (model(x) - y).pow(2).mean().detach()


@right
def gradients_per_sample():
    return step_per_sample, nn.Linear(4, 2), (torch.randn(3, 4), torch.randn(3, 2))
