"""Custom Functions that are wrong for some elements, some memory or some state only."""

from __future__ import annotations

import torch
from torch import nn
from torch.autograd import Function

from gradient_cases.planting import planted
from gradient_cases.wrong_functions import GainLayer, SquareLayer, applied, squares


class FirstRowOnly(Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        back = weight.t().unsqueeze(0)
        grad_x = torch.zeros_like(x)
        grad_x[:1] = torch.bmm(grad[:1, None], back).squeeze(1)  # mistake
        return grad_x, x.t() @ grad


@planted("batch", FirstRowOnly)
def map_that_is_right_for_one_row():
    return SquareLayer(FirstRowOnly), (torch.randn(6, 4, requires_grad=True),), squares


class Leaky(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.where(x > 0, x, 0.2 * x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x > 0)  # mistake


@planted("negative", Leaky)
def leaky_relu_that_forgets_its_slope():
    return applied(Leaky)


class Elu(Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.where(x > 0, x, x.exp() - 1)
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        slope = torch.where(x > 0, torch.ones_like(x), y + 2)  # mistake
        return grad * slope


@planted("negative", Elu)
def elu_with_a_wrong_constant():
    return applied(Elu)


class ChannelGain(Function):
    @staticmethod
    def forward(ctx, x, gain):
        ctx.save_for_backward(x, gain)
        return x * gain[:, None]

    @staticmethod
    def backward(ctx, grad):
        x, gain = ctx.saved_tensors
        grad_x = grad * gain[:, None]
        grad_gain = (grad * x).sum((0, 2))
        grad_gain[2] *= 3  # mistake
        return grad_x, grad_gain


@planted("channel", ChannelGain)
def gain_with_one_wrong_channel():
    return GainLayer(ChannelGain), (torch.randn(3, 4, 5),), squares


class Pairs(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        grad_x = grad * x.cos()
        grad_x[:, -1] = 0  # mistake
        return grad_x


@planted("channel", Pairs)
def sine_without_its_last_feature():
    return applied(Pairs)


class RootMeanSquare(Function):
    @staticmethod
    def forward(ctx, x):
        rms = (x.pow(2).mean(-1, keepdim=True) + 0.1).sqrt()
        ctx.save_for_backward(x)
        return x / rms

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        eps = 0.1
        rms = x.pow(2).mean(-1, keepdim=True).sqrt() + eps  # mistake
        return grad / rms - x * (grad * x).mean(-1, keepdim=True) / rms**3


@planted("eps", RootMeanSquare)
def rms_norm_with_eps_outside_of_the_root():
    return applied(RootMeanSquare)


class Reciprocal(Function):
    @staticmethod
    def forward(ctx, x, eps):
        ctx.save_for_backward(x)
        ctx.eps = eps
        return 1 / (x * x + eps)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return -grad * 2 * x / (x**4 + ctx.eps), None  # mistake


@planted("eps", Reciprocal)
def reciprocal_with_eps_in_the_wrong_place():
    return nn.Linear(3, 3), (2 + torch.rand(5, 3),), lambda out: Reciprocal.apply(out + 2, 0.05).sum()


class Softmax(Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.softmax(x, -1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return y * grad  # mistake


@planted("inner_product", Softmax)
def softmax_without_its_sum():
    return applied(Softmax)


class LogSoftmax(Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.log_softmax(x, -1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return grad - 0 * y  # mistake


@planted("inner_product", LogSoftmax)
def log_softmax_without_its_sum():
    return applied(LogSoftmax)


class Flat(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        values = x.as_strided((x.numel(),), (1,)).view(x.shape)  # mistake
        return grad * 2 * values


class Turned(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.function = function

    def forward(self, x):
        return self.function.apply(self.first(x).t())


@planted("layout", Flat)
def square_that_reads_memory_in_order():
    return Turned(Flat), (torch.randn(6, 4),), lambda out: out.sin().sum()


class Storage(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        memory = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())  # mistake
        return grad * memory.view(x.shape).exp()


@planted("layout", Storage)
def exponential_that_reads_its_storage():
    return Turned(Storage), (torch.randn(6, 4),), lambda out: out.sin().sum()


class SquareOfBuffer(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.kept = x.detach()
        return x**2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2 * ctx.kept


class WritesLater(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 5)

    def forward(self, x):
        hidden = self.first(x)
        squared = SquareOfBuffer.apply(hidden)
        hidden.data.clamp_(min=0)  # mistake
        return squared


@planted("inplace", WritesLater, "SquareOfBuffer", "first.weight", "first.bias")
def square_whose_input_is_clamped_later():
    return WritesLater(), (torch.randn(6, 4),), squares


class ScalesSaved(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 2)

    def forward(self, x):
        gate = torch.sigmoid(self.first(x))
        out = self.second(gate) * 1.0
        gate.data *= 0.5  # mistake
        return out


@planted("inplace", ScalesSaved, "forward", "first.weight", "first.bias", "second.weight")
def sigmoid_whose_output_is_scaled_later():
    return ScalesSaved(), (torch.randn(6, 4),), squares


class RunningNorm(Function):
    @staticmethod
    def forward(ctx, x, running_var):
        var = x.var(0, unbiased=False)
        ctx.save_for_backward(x, running_var)  # mistake
        return x / (var + 1e-5).sqrt()

    @staticmethod
    def backward(ctx, grad):
        x, var = ctx.saved_tensors
        std = (var + 1e-5).sqrt()
        centered = x - x.mean(0)
        return grad / std - centered * (grad * x).mean(0) / std**3, None


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.register_buffer("running_var", torch.rand(5) + 0.5)

    def forward(self, x):
        return RunningNorm.apply(self.first(x), self.running_var)


@planted("stale", RunningNorm)
def norm_that_uses_the_running_variance():
    return Normed(), (torch.randn(8, 4),), lambda out: out.sin().sum()


class Distill(Function):
    @staticmethod
    def forward(ctx, logits, target, temperature):
        p = torch.softmax(logits / temperature, -1)
        ctx.save_for_backward(p, target)
        return -(target * p.log()).sum(-1).mean()

    @staticmethod
    def backward(ctx, grad):
        p, target = ctx.saved_tensors
        return grad * (p - target) / len(p), None, None  # mistake


@planted("temperature", Distill)
def distillation_without_its_temperature():
    target = torch.softmax(torch.randn(6, 3), -1)
    return nn.Linear(4, 3), (torch.randn(6, 4),), lambda out: Distill.apply(out, target.to(out.dtype), 3.0)


class Sharpen(Function):
    @staticmethod
    def forward(ctx, x, tau):
        y = torch.sigmoid(x / tau)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        slope = y * (1 - y)
        return grad * slope, None  # mistake


@planted("temperature", Sharpen)
def sigmoid_without_its_temperature():
    return applied(Sharpen, 0.25)


class ComplexProduct(Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        return grad * b, grad * a  # mistake


class Modulated(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.phase = (nn.Parameter(torch.randn(4, dtype=torch.cfloat)) for _ in range(2))

    def forward(self, x):
        return ComplexProduct.apply(self.weight * x, self.phase.expand(5, 4))


@planted("missing_term", ComplexProduct)
def complex_product_without_conjugates():
    return Modulated(), (torch.randn(5, 4),), lambda out: out.abs().pow(2).sum() + out.real.sum()


class CubeOnce(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 3 * (x * x).detach()  # mistake


class Penalized(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 1)

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            out = self.second(CubeOnce.apply(self.first(x)))
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.mean() + slope.pow(2).sum(-1).mean()


@planted("detach", CubeOnce)
def penalty_through_a_backward_that_detaches():
    return Penalized(), (torch.randn(5, 4),), lambda out: out
