"""Find formulas in the autograd graph whose argument is not kept away from a singular point."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from gradwatch.formulas import ARGUMENTS, UNSTABLE, Formula
from gradwatch.probe.graph.graph import Graph, Node, is_leaf, operation, shape

GUARDS = frozenset({"Clamp", "ClampMin", "Maximum", "Exp", "Softplus", "Cosh", "Threshold", "NanToNum"})
"""Operations with a result that is positive, or kept away from 0."""

FRACTIONS = frozenset({"Softmax", "Sigmoid", "Hardsigmoid"})
"""Operations with a result between 0 and 1 that can round to either bound."""

BOUNDED = FRACTIONS | {"Tanh", "LogSoftmax", "LogSigmoid", "Neg", "Sub", "Clamp", "ClampMax", "Minimum", "Sin", "Cos"}
"""Operations after which an exponential rarely overflows: bounded ones, and subtractions."""

DESCRIPTIONS = {
    "Abs": "an absolute value",
    "Div": "a quotient",
    "LinalgVectorNorm": "a norm",
    "Mean": "a mean",
    "Mul": "a product",
    "Norm": "a norm",
    "Pow": "a power",
    "Relu": "a ReLU",
    "Rsub": "a difference",
    "Sigmoid": "a sigmoid",
    "Softmax": "a softmax",
    "Sqrt": "a square root",
    "Std": "a standard deviation",
    "Sub": "a difference",
    "Sum": "a sum",
    "Var": "a variance",
}


class SingularFormula(NamedTuple):
    """A formula that may be at its singular point: its rank (0 for the likeliest culprit), node and description."""

    rank: int
    node: Node
    formula: Formula
    argument: str
    text: str

    @property
    def values(self) -> dict[str, float]:
        """The formula and its argument, as events record them."""
        argument = ARGUMENTS.index(self.argument) if self.argument in ARGUMENTS else 0
        return {"formula": self.formula, "argument": argument}


def find_singularities(graph: Graph) -> list[SingularFormula]:
    """Return the formulas with an unguarded singular point, the likeliest first, then the nearest to the loss."""
    found = [formula for node in graph.nodes for formula in _match(graph, node)]
    # the sort is stable: of equal ranks, the nearest to the loss stays first
    return sorted(found, key=lambda formula: formula.rank)


def find_unstable(graph: Graph) -> list[SingularFormula]:
    """Return the formulas that another form replaces everywhere, also if no value is near the singular point."""
    return [found for found in find_singularities(graph) if found.formula in UNSTABLE]


def is_log_of_fraction(graph: Graph, node: Node) -> bool:
    """Return whether a node is the logarithm of a softmax or sigmoid, which rounds to log(0)."""
    return operation(node) == "Log" and _operation_of(graph, graph.first(node)) in FRACTIONS


def is_cancelling_variance(graph: Graph, node: Node) -> bool:
    """Return whether a node is E[x^2] - E[x]^2, which rounding makes negative if the deviation is small."""
    if operation(node) != "Sub" or len(graph.inputs(node)) != 2:
        return False
    mean_square, square_mean = (graph.through(child) for child in graph.inputs(node))
    if mean_square is None or square_mean is None:
        return False
    inner = squared(graph, _averaged(graph, mean_square))
    mean = _averaged(graph, graph.through(squared(graph, square_mean)))
    return inner is not None and mean is not None and _same_source(graph, inner, mean)


def _match(graph: Graph, node: Node) -> Iterator[SingularFormula]:
    name = operation(node)
    # each special formula comes before the general one that it would match, too
    if name in ("Acos", "Asin", "Atanh"):
        yield from _unguarded(
            graph,
            node,
            0,
            Formula[name.upper()],
            f"{name.lower()} of %s that is not clamped: its gradient at 1 is infinite",
        )
    elif is_log_of_fraction(graph, node):
        text = "the log of %s can round to log(0)"
        yield from _unguarded(graph, node, 1, Formula.LOG_OF_FRACTION, text)
    elif name in ("Log", "Log1P") and (latent := _latent_logarithm(graph, node)):
        yield latent
    elif name in ("Log", "Log2", "Log10"):
        yield from _unguarded(graph, node, 2, Formula.LOG, "the log of %s that may be 0")
    elif is_cancelling_variance(graph, node):
        text = "a variance as E[x^2] - E[x]^2, which can become negative by rounding"
        yield SingularFormula(2, node, Formula.VARIANCE, "", text)
    elif name in ("Sqrt", "Rsqrt") or _is_root(node):
        formula = _root_formula(graph, node)
        text = "the square root of %s that may be 0, where its gradient is infinite"
        yield from _unguarded(graph, node, 3, formula, text)
    elif name == "Std":
        text = "a standard deviation: its gradient is infinite if all values are equal"
        yield SingularFormula(3, node, Formula.DEVIATION, "", text)
    elif _is_softmax(graph, node):
        text = "a softmax by hand: its exponentials can overflow"
        yield SingularFormula(4, node, Formula.SOFTMAX, "", text)
    elif name in ("Div", "Reciprocal"):
        # a constant divisor has no node: the last edge is None
        divisor = graph.edges(node)[-1] if name == "Div" else graph.first(node)
        if divisor is None and _is_masked_sum(graph, graph.first(node)):
            text = "a masked sum is divided by a number that is 0 if the mask is empty"
            yield SingularFormula(4, node, Formula.MASKED_MEAN, "", text)
        elif divisor is not None and not _is_guarded(graph, divisor):
            text = f"a division by {_describe(graph, divisor)} that may be 0"
            yield SingularFormula(4, node, Formula.QUOTIENT, _operation_of(graph, divisor), text)
    elif name in ("CtcLoss", "CudnnCtcLoss") and not node._saved_zero_infinity:
        text = "a CTC loss is infinite if a target is longer than its input: zero_infinity=True"
        yield SingularFormula(2, node, Formula.CTC, "", text)
    elif _is_unbounded_exponential(graph, node):
        yield SingularFormula(5, node, Formula.EXPONENTIAL, "", "an unbounded exponential")


def _latent_logarithm(graph: Graph, node: Node) -> SingularFormula | None:
    """Return a logarithm of a complement or of exponentials, for which torch has one stable function."""
    argument = graph.through(graph.first(node))
    if argument is None:
        return None
    name, inputs, is_log = operation(argument), graph.inputs(argument), operation(node) == "Log"
    inner = graph.through(inputs[0]) if len(inputs) == 1 else None
    # 1 - p, where 1 is a number or a constant tensor; or log1p(-p)
    is_difference = name == "Rsub" or (name == "Sub" and graph.first(argument) is None)
    if (is_difference if is_log else name == "Neg") and inner is not None and operation(inner) == "Sigmoid":
        text = "the log of 1 minus a sigmoid can round to log(0)"
        return SingularFormula(1, node, Formula.LOG_OF_COMPLEMENT, "Sigmoid", text)
    if is_log and name == "Sum" and _is_unbounded_exponential(graph, inner):
        return SingularFormula(5, node, Formula.LOG_SUM_EXP, "", "a log-sum-exp by hand: its exponentials can overflow")
    if _is_unbounded_exponential(graph, inner if is_log and name == "Add" else None if is_log else argument):
        return SingularFormula(5, node, Formula.SOFTPLUS, "", "a softplus by hand: its exponential can overflow")
    return None


def _is_unbounded_exponential(graph: Graph, node: Node | None) -> bool:
    """Return whether a node is an exponential of values that may be large: neither bounded nor shifted."""
    return node is not None and operation(node) == "Exp" and _operation_of(graph, graph.first(node)) not in BOUNDED


def _is_softmax(graph: Graph, node: Node) -> bool:
    """Return whether a node divides an unbounded exponential by the sum of the same exponential."""
    edges = graph.edges(node)
    if operation(node) != "Div" or len(edges) != 2:
        return False
    above, below = graph.through(edges[0]), graph.through(edges[1])
    if not _is_unbounded_exponential(graph, above) or below is None or operation(below) != "Sum":
        return False
    return graph.through(graph.first(below)) is above


def _root_formula(graph: Graph, node: Node) -> Formula:
    """Return the kind of a root: a norm and a deviation have a stable form, the root of any other value has none."""
    argument = graph.through(graph.first(node))
    if argument is None or operation(node) == "Rsqrt":
        return Formula.ROOT
    of_squares = squared(graph, graph.through(graph.first(argument))) is not None
    if operation(argument) == "Sum" and of_squares:
        return Formula.NORM
    # over the whole batch, a mean of squares is almost never 0
    is_spread = operation(argument) == "Var" or (operation(argument) == "Mean" and of_squares)
    return Formula.SPREAD if is_spread and len(shape(node)) > 0 else Formula.ROOT


def _unguarded(graph: Graph, node: Node, rank: int, formula: Formula, text: str) -> Iterator[SingularFormula]:
    argument = graph.first(node)
    if argument is not None and not _is_guarded(graph, argument):
        yield SingularFormula(rank, node, formula, _operation_of(graph, argument), text % _describe(graph, argument))


def _is_guarded(graph: Graph, node: Node) -> bool:
    """Return whether a value is clamped, positive, or shifted by a constant."""
    made_by = graph.through(node)
    # None is a constant
    if made_by is None or operation(made_by) in GUARDS:
        return True
    if operation(made_by) == "Add":  # with a constant only
        return len(graph.inputs(made_by)) == 1
    # a sum of exponentials is at least as large as each of them
    return operation(made_by) == "Sum" and _operation_of(graph, graph.first(made_by)) in GUARDS


def _is_masked_sum(graph: Graph, node: Node | None) -> bool:
    """Return whether a value is the sum of values that a constant multiplies."""
    if node is None or operation(node) != "Sum":
        return False
    product = graph.through(graph.first(node))
    return product is not None and operation(product) == "Mul" and len(graph.inputs(product)) == 1


def _is_root(node: Node) -> bool:
    return operation(node) == "Pow" and _exponent(node) < 1


def _operation_of(graph: Graph, node: Node | None) -> str:
    made_by = graph.through(node)
    return operation(made_by) if made_by is not None else ""


def _exponent(node: Node) -> float:
    """Return the exponent of a power, or nan if it is a tensor, as in `2**x`, or missing."""
    exponent = getattr(node, "_saved_exponent", math.nan)
    return float(exponent) if isinstance(exponent, (int, float)) else math.nan


def _describe(graph: Graph, node: Node) -> str:
    return DESCRIPTIONS.get(_operation_of(graph, node), "a value")


def _averaged(graph: Graph, node: Node | None) -> Node | None:
    """Return the argument of a mean, or of a sum that is divided."""
    node = graph.through(node)
    if node is not None and operation(node) in ("Div", "Mul") and len(graph.inputs(node)) == 1:
        node = graph.through(graph.inputs(node)[0])
    return graph.through(graph.first(node)) if node is not None and operation(node) in ("Mean", "Sum") else None


def squared(graph: Graph, node: Node | None) -> Node | None:
    """Return the argument of a square."""
    if node is None:
        return None
    if operation(node) == "Pow" and _exponent(node) == 2:
        return graph.first(node)
    edges = graph.edges(node)
    # x * x, by the identity of both arguments
    return edges[0] if operation(node) == "Mul" and len(edges) == 2 and edges[0] is edges[1] else None


def _same_source(graph: Graph, one: Node, other: Node) -> bool:
    one, other = graph.through(one), graph.through(other)
    # layouts are skipped, so views of one value count as one source
    return one is other and one is not None and not is_leaf(one)
