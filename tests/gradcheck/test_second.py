"""The second derivative of a custom Function is compared with differences of its gradients."""

import linecache

import pytest
import torch
from torch import nn
from torch.autograd.function import once_differentiable

import gradwatch


class Cube(torch.autograd.Function):
    """x cubed, with a backward that torch differentiates right."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 3 * grad * x**2


class CutArgument(Cube):
    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 3 * grad * x.detach() ** 2


class CutGradient(Cube):
    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 3 * grad.detach() * x**2


class Intermediate(torch.autograd.Function):
    """exp of x, with a value that is saved from inside of the forward pass."""

    @staticmethod
    def forward(ctx, x):
        ctx.exp = x.exp()
        return ctx.exp.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.exp


class Once(Cube):
    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 3 * grad * x**2


def checked(function, **options):
    torch.manual_seed(0)
    layer = nn.Linear(4, 3)
    step = (lambda x: function.apply(layer(x)).mean()) if function else lambda x: layer(x).square().mean()
    return gradwatch.check(step, torch.randn(8, 4), model=layer, **options)


@pytest.mark.parametrize("function", [CutArgument, CutGradient, Intermediate])
def test_a_wrong_second_derivative_is_named_with_its_line(function):
    assert not checked(function).is_wrong  # the first derivative is right

    found = checked(function, second=True)

    (fault,) = found.faults
    assert fault.where == function.__name__
    assert f"the second derivative through {function.__name__}.backward is wrong" in fault.text
    line = linecache.getline(fault.place.file, fault.place.line)
    assert ("detach()" in line) == (function is not Intermediate)
    assert {t.verdict for t in found.tensors} == {"right"}
    assert not checked(function, second=True, allow=[function.__name__]).is_wrong


@pytest.mark.parametrize(
    ("function", "note"),
    [
        (Cube, "the second derivative of Cube is right"),
        (Once, "Once cannot be differentiated twice: torch raises"),
        (None, "there is no custom Function whose second derivative could be wrong"),
    ],
)
def test_a_second_derivative_that_is_right_or_absent_is_no_mistake(function, note):
    found = checked(function, second=True)

    assert not found.is_wrong
    assert note in found.notes
