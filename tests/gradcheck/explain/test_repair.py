"""A small change of a backward that makes it right names the mistake, however the statement is written."""

import pytest
import torch
from torch.autograd import Function

from gradwatch.gradcheck.explain.repair import repair

X, WEIGHT, GRAD = (torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in range(3))


class Times(Function):
    """x @ weight + bias, with the backward of a subclass."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return x @ weight + bias - bias.sum()


class SumOfOtherAxis(Times):
    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.mT, x.mT @ grad, grad.sum(dim=1) - grad.sum()


class SumOfOtherAxisByFunction(Times):
    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.mT, x.mT @ grad, torch.sum(grad, 1) - grad.sum()


class FirstRow(Times):
    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.mT, x.mT @ grad, grad[0] - grad.sum()


class AddedTerm(Times):
    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        of_bias = torch.empty(4, dtype=grad.dtype)
        of_bias[0] = grad[:, 0].sum()
        of_bias[1:] = grad[:, 1:].sum(0)
        of_bias += grad.sum()
        return grad @ weight.mT, x.mT @ grad, of_bias


class NegatedTerm(Times):
    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.mT, x.mT @ grad, grad.sum(0).neg() - grad.sum()


class ProductByFunction(Times):
    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return torch.mm(grad, weight), x.mT @ grad, grad.sum(0) - grad.sum()


class ProductByMethod(Times):
    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.mT, x.mm(grad), grad.sum(0) - grad.sum()


class TransposedTwice(Times):
    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.mT.transpose(0, 1), x.mT @ grad, grad.sum(0) - grad.sum()


class FactorBefore(Times):
    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.mT, 2 * (x.mT @ grad), grad.sum(0) - grad.sum()


MISTAKES = {
    FactorBefore: "factor",
    SumOfOtherAxis: "broadcast",
    SumOfOtherAxisByFunction: "broadcast",
    FirstRow: "broadcast",
    AddedTerm: "sign",
    NegatedTerm: "sign",
    ProductByFunction: "transposed",
    ProductByMethod: "transposed",
    TransposedTwice: "transposed",
}


@pytest.mark.parametrize("function", MISTAKES, ids=lambda f: f.__name__)
def test_the_change_that_makes_a_backward_right_has_its_kind(function):
    def gradients(apply):
        leaves = [t.clone().requires_grad_() for t in (X, WEIGHT, GRAD[0])]
        return torch.autograd.grad(apply(*leaves), leaves, GRAD)

    right = gradients(lambda x, weight, bias: x @ weight + bias - bias.sum())

    def is_right():
        return all(torch.allclose(a, b) for a, b in zip(gradients(function.apply), right, strict=True))

    assert not is_right()
    found = repair(function, is_right)

    assert found is not None
    assert found.kind == MISTAKES[function]
    assert not is_right(), "the backward is put back"
