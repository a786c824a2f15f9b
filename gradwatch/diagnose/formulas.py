"""Write the stable form of an operation that the autograd graph shows near its singular point."""

from __future__ import annotations

from collections.abc import Callable

from gradwatch.diagnose.case import Case
from gradwatch.events import ARGUMENTS, LOG_OF_SOFTMAX, SINGULAR, Formula
from gradwatch.records import Remedy

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


def stable_formula(case: Case) -> Remedy | None:
    """Return the stable form of the likeliest singular formula of the graph, or None if the graph shows none."""
    found = sorted((e for e in case.events if e.kind == SINGULAR.name), key=lambda e: e.values.get("rank", 0))
    event = next((e for e in found if "formula" in e.values), None)  # older runs record no formula
    if event is None:
        if any(e.kind == LOG_OF_SOFTMAX.name for e in case.events):
            return _remedy(case, LOG_OF_FRACTION, None)
        return None
    formula, argument = Formula(int(event.values["formula"])), ARGUMENTS[int(event.values["argument"])]
    code = LOGARITHMS.get(argument, LOG_OF_FRACTION) if formula is Formula.LOG_OF_FRACTION else _code(formula, argument)
    return _remedy(case, code, event.layer)


def _code(formula: Formula, argument: str) -> str:
    x = OPERANDS.get(argument, "x")
    guarded = f"{x}.clamp(min=eps)" if argument in SIGNED else f"({x} + eps)"
    return STABLE[formula](x, guarded)


def _remedy(case: Case, code: str, layer: str | None) -> Remedy:
    after = f" after {case.variable(layer)}" if layer else ""
    guard = ", with eps = 1e-6" if "eps" in code else ""
    return Remedy(text=f"write the operation{after} that the autograd graph shows as {code}{guard}", code=code)


LOG_OF_FRACTION = "torch.log_softmax(x, -1)  # or torch.nn.functional.logsigmoid(x)"
LOGARITHMS = {"Softmax": "torch.log_softmax(x, -1)", "Sigmoid": "torch.nn.functional.logsigmoid(x)"}

STABLE: dict[Formula, Callable[[str, str], str]] = {
    Formula.ACOS: lambda x, _: f"{x}.clamp(-1 + eps, 1 - eps).acos()",
    Formula.ASIN: lambda x, _: f"{x}.clamp(-1 + eps, 1 - eps).asin()",
    Formula.ATANH: lambda x, _: f"{x}.clamp(-1 + eps, 1 - eps).atanh()",
    Formula.LOG: lambda _, guarded: f"{guarded}.log()",
    Formula.VARIANCE: lambda *_: "x.var(-1, correction=0)",
    Formula.ROOT: lambda _, guarded: f"{guarded}.sqrt()",
    Formula.DEVIATION: lambda *_: "(x.var(-1) + eps).sqrt()",
    Formula.QUOTIENT: lambda _, guarded: f"numerator / {guarded}",
    Formula.EXPONENTIAL: lambda x, _: f"{x}.clamp(max=80).exp()",
    Formula.MASKED_MEAN: lambda *_: "(values * mask).sum() / mask.sum().clamp(min=1)",
    Formula.CTC: lambda *_: "F.ctc_loss(..., zero_infinity=True)",
}
"""Stable form of each formula, from the code of its argument and of its guarded argument."""
