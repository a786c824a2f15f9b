"""List the formulas that are singular or lose their digits, as the autograd graph shows them, with the stable form."""

from __future__ import annotations

import enum
from collections.abc import Callable


class Formula(enum.IntEnum):
    """An operation with a singular point, as the events of the graph record it. Numbers never change."""

    ACOS = 1
    ASIN = 2
    ATANH = 3
    LOG_OF_FRACTION = 4
    LOG = 5
    VARIANCE = 6
    ROOT = 7
    DEVIATION = 8
    QUOTIENT = 9
    EXPONENTIAL = 10
    MASKED_MEAN = 11
    CTC = 12
    LOG_OF_COMPLEMENT = 13
    LOG_SUM_EXP = 14
    SOFTMAX = 15
    SOFTPLUS = 16
    NORM = 17
    SPREAD = 18


UNSTABLE = frozenset(
    {
        Formula.ACOS,
        Formula.ASIN,
        Formula.ATANH,
        Formula.LOG_OF_COMPLEMENT,
        Formula.LOG_OF_FRACTION,
        Formula.LOG_SUM_EXP,
        Formula.NORM,
        Formula.SOFTMAX,
        Formula.SOFTPLUS,
        Formula.SPREAD,
        Formula.VARIANCE,
    }
)
"""Formulas to report while every value is finite: another form gives the same value and is stable everywhere."""

ARGUMENTS = (
    "",
    "Abs",
    "Div",
    "LinalgVectorNorm",
    "Mean",
    "Mul",
    "Norm",
    "Pow",
    "Relu",
    "Rsub",
    "Sigmoid",
    "Softmax",
    "Sqrt",
    "Std",
    "Sub",
    "Sum",
    "Var",
)
"""Operations of autograd by the numbers that events record; 0 is any other. New ones are added at the end."""

OPERANDS = {
    "Abs": "x.abs()",
    "LinalgVectorNorm": "x.norm(dim=-1)",
    "Mean": "x.mean(-1)",
    "Mul": "(x * y)",
    "Norm": "x.norm(dim=-1)",
    "Pow": "x.square()",
    "Relu": "x.relu()",
    "Rsub": "(1 - x)",
    "Sigmoid": "x.sigmoid()",
    "Softmax": "x.softmax(-1)",
    "Std": "x.std(-1)",
    "Sub": "(x - y)",
    "Sum": "x.sum(-1)",
    "Var": "x.var(-1)",
}
"""Code of the operation that makes an argument; `x` is for any other."""

SIGNED = ("Sub", "Rsub", "Mean", "Mul", "Sum")
"""Operations with a result that may be negative, which adding a small number does not guard."""

LOG_OF_FRACTION = "torch.log_softmax(x, -1)  # or torch.nn.functional.logsigmoid(x)"

BY_ARGUMENT = {
    (Formula.LOG_OF_FRACTION, "Softmax"): "torch.log_softmax(x, -1)",
    (Formula.LOG_OF_FRACTION, "Sigmoid"): "torch.nn.functional.logsigmoid(x)",
    (Formula.SPREAD, "Var"): "(x.var(-1) + eps).sqrt()",
}
"""Stable forms that depend on what makes the argument."""

STABLE: dict[Formula, Callable[[str, str], str]] = {
    Formula.ACOS: lambda x, _: f"{x}.clamp(-1 + eps, 1 - eps).acos()",
    Formula.ASIN: lambda x, _: f"{x}.clamp(-1 + eps, 1 - eps).asin()",
    Formula.ATANH: lambda x, _: f"{x}.clamp(-1 + eps, 1 - eps).atanh()",
    Formula.LOG: lambda _, guarded: f"{guarded}.log()",
    Formula.LOG_OF_FRACTION: lambda *_: LOG_OF_FRACTION,
    Formula.LOG_OF_COMPLEMENT: lambda *_: "torch.nn.functional.logsigmoid(-x)",
    Formula.LOG_SUM_EXP: lambda *_: "torch.logsumexp(x, -1)",
    Formula.SOFTMAX: lambda *_: "torch.softmax(x, -1)",
    Formula.SOFTPLUS: lambda *_: "torch.nn.functional.softplus(x)",
    Formula.NORM: lambda *_: "torch.linalg.vector_norm(x, dim=-1)",
    Formula.SPREAD: lambda *_: "(x.square().mean(-1) + eps).sqrt()",
    Formula.VARIANCE: lambda *_: "x.var(-1, correction=0)",
    Formula.ROOT: lambda _, guarded: f"{guarded}.sqrt()",
    Formula.DEVIATION: lambda *_: "(x.var(-1) + eps).sqrt()",
    Formula.QUOTIENT: lambda _, guarded: f"numerator / {guarded}",
    Formula.EXPONENTIAL: lambda x, _: f"{x}.clamp(max=80).exp()",
    Formula.MASKED_MEAN: lambda *_: "(values * mask).sum() / mask.sum().clamp(min=1)",
    Formula.CTC: lambda *_: "F.ctc_loss(..., zero_infinity=True)",
}
"""Stable form of each formula, from the code of its argument and of its guarded argument."""


def stable_code(formula: Formula, argument: str) -> str:
    """Return the stable form of a formula as code.

    Args:
        formula: The formula.
        argument: Operation that makes its argument, one of `ARGUMENTS`.
    """
    x = OPERANDS.get(argument, "x")
    guarded = f"{x}.clamp(min=eps)" if argument in SIGNED else f"({x} + eps)"
    return BY_ARGUMENT.get((formula, argument)) or STABLE[formula](x, guarded)
