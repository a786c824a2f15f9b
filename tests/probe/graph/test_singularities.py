"""Unstable formulas are found while every value is finite, with the form that replaces them; stable ones are not."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gradwatch.formulas import UNSTABLE, Formula, stable_code
from gradwatch.probe.graph.graph import Graph
from gradwatch.probe.graph.singularities import find_unstable

X = torch.linspace(-2, 2, 12).reshape(3, 4)
LINEAR = nn.Linear(4, 4)


def exp_sum(x):
    return x.exp().sum(1)


def mean_square(x):
    return x.square().mean(1)


FORMULAS = {
    "log of a softmax": (Formula.LOG_OF_FRACTION, lambda x: x.softmax(1).log(), F.log_softmax(X, 1)),
    "log of a sigmoid": (Formula.LOG_OF_FRACTION, lambda x: x.sigmoid().log(), F.logsigmoid(X)),
    "log of 1 minus a sigmoid": (Formula.LOG_OF_COMPLEMENT, lambda x: (1 - x.sigmoid()).log(), F.logsigmoid(-X)),
    "the same by a tensor": (
        Formula.LOG_OF_COMPLEMENT,
        lambda x: (torch.ones(3, 4) - x.sigmoid()).log(),
        F.logsigmoid(-X),
    ),
    "the same by log1p": (Formula.LOG_OF_COMPLEMENT, lambda x: (-x.sigmoid()).log1p(), F.logsigmoid(-X)),
    "log-sum-exp": (Formula.LOG_SUM_EXP, lambda x: exp_sum(x).log(), torch.logsumexp(X, 1)),
    "softmax": (Formula.SOFTMAX, lambda x: x.exp() / x.exp().sum(1, keepdim=True), None),
    "softmax of one exponential": (Formula.SOFTMAX, lambda x: (e := x.exp()) / e.sum(1)[:, None], F.softmax(X, 1)),
    "softplus": (Formula.SOFTPLUS, lambda x: (1 + x.exp()).log(), F.softplus(X)),
    "softplus by log1p": (Formula.SOFTPLUS, lambda x: x.exp().log1p(), F.softplus(X)),
    "variance": (Formula.VARIANCE, lambda x: mean_square(x) - x.mean(1) ** 2, X.var(1, correction=0)),
    "norm": (Formula.NORM, lambda x: (x * x).sum(1).sqrt(), torch.linalg.vector_norm(X, dim=1)),
    "root of a variance": (Formula.SPREAD, lambda x: x.var(1).sqrt(), (X.var(1) + 1e-12).sqrt()),
    "root mean square": (Formula.SPREAD, lambda x: mean_square(x).sqrt(), (mean_square(X) + 1e-12).sqrt()),
    "acos": (Formula.ACOS, lambda x: (x / 3).acos(), None),
}


@pytest.mark.parametrize("name", [n for n in FORMULAS if n != "softmax"])
def test_a_formula_that_another_form_replaces_is_found(name):
    formula, write, _ = FORMULAS[name]

    found = find_unstable(Graph(write(LINEAR(X)).sum()))

    assert [f.formula for f in found] == [formula]


@pytest.mark.parametrize("name", [n for n, (_, _, right) in FORMULAS.items() if right is not None])
def test_the_form_that_is_named_gives_the_same_values(name):
    formula, write, right = FORMULAS[name]
    argument = find_unstable(Graph(write(LINEAR(X)).sum()))[0].argument

    code = stable_code(formula, argument)

    names = {"torch": torch, "eps": 1e-12, "x": X}
    assert torch.allclose(eval(code, names), right)
    assert torch.allclose(write(X), right, atol=1e-6)


STABLE = {
    "log_softmax": lambda x: x.log_softmax(1),
    "a sum of shifted exponentials": lambda x: exp_sum(x - x.amax(1, keepdim=True)).log(),
    "a softmax of shifted exponentials": lambda x: (e := (x - x.max()).exp()) / e.sum(1, keepdim=True),
    "softplus of a negative magnitude": lambda x: (-x.abs()).exp().log1p(),
    "a clamped probability": lambda x: x.sigmoid().clamp(1e-6, 1 - 1e-6).log(),
    "a norm of torch": lambda x: x.norm(dim=1),
    "a norm with an epsilon": lambda x: (x.square().sum(1) + 1e-8).sqrt(),
    "the error of the whole batch": lambda x: (x - 1).square().mean().sqrt(),
    "the entropy of a softmax": lambda x: x.softmax(1) * x.log_softmax(1),
    "the exponential of a log-variance": lambda x: x.exp() + 1,
    "a division": lambda x: x / x.square().sum(),
    "another variance": lambda x: mean_square(x) - x.max(1).values ** 2,
}


@pytest.mark.parametrize("name", STABLE)
def test_a_stable_formula_or_one_without_another_form_is_not_found(name):
    assert find_unstable(Graph(STABLE[name](LINEAR(X)).sum())) == []


def test_every_unstable_formula_has_a_case():
    planted = {formula for formula, _, _ in FORMULAS.values()}

    assert UNSTABLE - planted == {Formula.ASIN, Formula.ATANH}, "they share the branch of acos"
