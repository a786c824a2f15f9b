"""Custom Functions with a planted mistake in their backward: elementwise ones and linear maps."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function

from gradient_cases.planting import planted


class Apply(nn.Module):
    """Apply a Function between two linear layers."""

    def __init__(self, function, *args, width=5):
        super().__init__()
        self.first, self.second = nn.Linear(4, width), nn.Linear(width, 2)
        self.function, self.args = function, args

    def forward(self, x):
        return self.second(self.function.apply(self.first(x), *self.args))


def squares(out):
    return out.pow(2).mean()


def applied(function, *args, width=5):
    return Apply(function, *args, width=width), (torch.randn(6, 4),), squares


class Cube(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 2 * x**2  # mistake


@planted("factor", Cube)
def cube_with_a_factor_of_two():
    return applied(Cube)


class MeanSquare(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.pow(2).mean()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad  # mistake


@planted("factor", MeanSquare)
def mean_square_without_its_mean():
    return nn.Linear(4, 3), (torch.randn(6, 4, requires_grad=True),), lambda out: MeanSquare.apply(out)


class Difference(Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return (a - b) * a

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        grad_a = grad * (2 * a + b)  # mistake
        grad_b = -grad * a
        return grad_a, grad_b


class TwoArms(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Linear(4, 3)
        self.function = function

    def forward(self, x):
        return self.function.apply(self.left(x), self.right(x))


@planted("sign", Difference)
def difference_with_a_plus():
    return TwoArms(Difference), (torch.randn(5, 4),), squares


class SoftSign(Function):
    @staticmethod
    def forward(ctx, x):
        below = 1 + x.abs()
        ctx.save_for_backward(below)
        return x / below

    @staticmethod
    def backward(ctx, grad):
        (below,) = ctx.saved_tensors
        return -grad / below**2  # mistake


@planted("sign", SoftSign)
def softsign_with_a_minus():
    return applied(SoftSign)


class DenseMeanBias(Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return x @ weight.t() + bias

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad_x = grad @ weight
        grad_weight = grad.t() @ x
        grad_bias = grad.mean(0)  # mistake
        return grad_x, grad_weight, grad_bias


class Dense(nn.Module):
    def __init__(self, function, wide=4, out=3):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(out, wide)), nn.Parameter(torch.randn(out))
        self.function = function

    def forward(self, x):
        return self.function.apply(x, self.weight, self.bias)


@planted("bias_mean", DenseMeanBias)
def dense_with_a_mean_for_the_bias():
    return Dense(DenseMeanBias), (torch.randn(8, 4, requires_grad=True),), squares


class ConvMeanBias(Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return F.conv1d(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad_x = F.conv_transpose1d(grad, weight)
        columns = x.unfold(2, weight.shape[2], 1)
        grad_weight = torch.einsum("nol,nilk->oik", grad, columns)
        grad_bias = grad.sum((0, 2)) / grad.shape[0]  # mistake
        return grad_x, grad_weight, grad_bias


class ConvBias(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(3, 2, 3)), nn.Parameter(torch.randn(3))

    def forward(self, x):
        return ConvMeanBias.apply(x, self.weight, self.bias)


@planted("bias_mean", ConvMeanBias)
def convolution_with_a_bias_over_the_batch():
    return ConvBias(), (torch.randn(4, 2, 7),), squares


class Swish(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        gate = torch.sigmoid(x)
        return grad * gate  # mistake


@planted("missing_term", Swish)
def swish_without_its_second_term():
    return applied(Swish)


class Center(Function):
    @staticmethod
    def forward(ctx, x):
        mean = x.mean(-1, keepdim=True)
        std = x.var(-1, keepdim=True, unbiased=False).add(1e-5).sqrt()
        y = (x - mean) / std
        ctx.save_for_backward(y, std)
        return y

    @staticmethod
    def backward(ctx, grad):
        y, std = ctx.saved_tensors
        return (grad - y * (grad * y).mean(-1, keepdim=True)) / std  # mistake


@planted("missing_term", Center)
def layer_norm_without_the_mean_of_the_gradient():
    return applied(Center)


class SquareMap(Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad_x = grad @ weight.t()
        grad_weight = grad.t() @ x  # mistake
        return grad_x, grad_weight


class SquareLayer(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.function = function

    def forward(self, x):
        return self.function.apply(x, self.weight)


@planted("transposed", SquareMap)
def square_map_transposed():
    return SquareLayer(SquareMap), (torch.randn(6, 4),), lambda out: torch.tanh(out).sum()


class Bilinear(Function):
    @staticmethod
    def forward(ctx, a, form, b):
        ctx.save_for_backward(a, form, b)
        return torch.einsum("ni,ij,nj->n", a, form, b)

    @staticmethod
    def backward(ctx, grad):
        a, form, b = ctx.saved_tensors
        g = grad[:, None]
        outer = b.t() @ (g * a)  # mistake
        return g * (b @ form.t()), outer, g * (a @ form)


class Form(nn.Module):
    def __init__(self):
        super().__init__()
        self.form = nn.Parameter(torch.randn(3, 3))

    def forward(self, a, b):
        return Bilinear.apply(a, self.form, b)


@planted("transposed", Bilinear)
def bilinear_form_transposed():
    return Form(), (torch.randn(5, 3, requires_grad=True), torch.randn(5, 3)), squares


class TanhOfInput(Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.tanh(x)
        ctx.save_for_backward(x)  # mistake
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return grad * (1 - y * y)


@planted("wrong_saved", TanhOfInput)
def tanh_that_saves_its_input():
    return applied(TanhOfInput)


class ExpOfInput(Function):
    @staticmethod
    def forward(x, scale):
        return torch.exp(x) * scale

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, scale = inputs
        ctx.save_for_backward(x)  # mistake
        ctx.scale = scale

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return grad * y, None


@planted("wrong_saved", ExpOfInput)
def exponential_that_saves_its_input():
    return applied(ExpOfInput, 0.5)


class DenseNoBias(Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return torch.addmm(bias, x, weight.t())

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x, None  # mistake


@planted("missing_grad", DenseNoBias)
def dense_without_a_gradient_of_the_bias():
    return Dense(DenseNoBias), (torch.randn(6, 4),), squares


class Gain(Function):
    @staticmethod
    def forward(ctx, x, gain):
        ctx.save_for_backward(x, gain)
        return x * gain

    @staticmethod
    def backward(ctx, grad):
        _, gain = ctx.saved_tensors
        grad_gain = torch.zeros_like(gain)  # mistake
        return grad * gain, grad_gain


class GainLayer(nn.Module):
    def __init__(self, function, shape=(4,)):
        super().__init__()
        self.gain = nn.Parameter(torch.rand(shape) + 0.5)
        self.function = function

    def forward(self, x):
        return self.function.apply(x, self.gain)


@planted("missing_grad", Gain)
def gain_with_a_gradient_of_zeros():
    return GainLayer(Gain), (torch.randn(6, 4, requires_grad=True),), lambda out: out.sin().sum()


class Hinge(Function):
    @staticmethod
    def forward(ctx, score, sign):
        slack = (1 - sign * score).clamp_min(0)
        ctx.save_for_backward(slack, sign)
        return slack.mean()

    @staticmethod
    def backward(ctx, grad):
        slack, sign = ctx.saved_tensors
        return -sign * (slack > 0) / slack.numel(), None  # mistake


@planted("no_grad_output", Hinge)
def hinge_that_ignores_its_weight():
    sign = torch.tensor([1.0, -1, 1, -1, 1, 1])
    return nn.Linear(4, 1), (torch.randn(6, 4),), lambda out: 0.1 * Hinge.apply(out[:, 0], sign.to(out.dtype))


class Abs(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.abs()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return x.sign()  # mistake


@planted("no_grad_output", Abs)
def absolute_value_that_ignores_its_gradient():
    return applied(Abs)


class RowScale(Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x, scale)
        return x * scale[:, None]

    @staticmethod
    def backward(ctx, grad):
        x, scale = ctx.saved_tensors
        grad_scale = (grad * x).sum(0)  # mistake
        return grad * scale[:, None], grad_scale


@planted("broadcast", RowScale)
def row_scale_summed_over_rows():
    return GainLayer(RowScale, (5,)), (torch.randn(5, 5, requires_grad=True),), squares


class AddBias(Function):
    @staticmethod
    def forward(ctx, x, bias):
        return x + bias

    @staticmethod
    def backward(ctx, grad):
        return grad, grad.sum(1)  # mistake


@planted("broadcast", AddBias)
def bias_summed_over_features():
    return GainLayer(AddBias), (torch.randn(4, 4, requires_grad=True),), squares
