"""Try small changes of a backward's source: the change that makes the gradient right names the mistake and its line."""

from __future__ import annotations

import ast
import copy
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

from torch.autograd import Function

from gradwatch.gradcheck.explain.wording import Named
from gradwatch.gradcheck.source import FunctionSource, source_of
from gradwatch.gradcheck.stepping.function_calls import method
from gradwatch.probe.place import Place

MAX_CHANGES = 240
"""Changes to try for one backward."""
PRODUCTS = ("mm", "matmul", "bmm")
LOST_FACTORS = (2, 3, 0.5)
"""Factors that one term of a sum may lack, from derivatives of powers."""


def repair(function: type[Function], is_right: Callable[[], bool]) -> Named | None:
    """Return the mistake that a small change of a backward undoes: the first change that `is_right` accepts, or None.

    Args:
        function: The custom Function; its backward is restored afterwards.
        is_right: Applies the Function and judges its gradients.
    """
    backward = method(function, "backward")
    source = source_of(backward)
    if not isinstance(source.node, ast.FunctionDef):
        return None
    for number, (kind, line, tree) in enumerate(_changes(source)):
        if number >= MAX_CHANGES:
            break
        changed = _compiled(tree, backward, source.file)
        with _instead(function, changed):
            try:
                if is_right():
                    return Named(kind, Place(source.file, line))
            except Exception:  # most changes yield shapes that do not match
                continue
    return None


def _changes(source: FunctionSource) -> Iterator[tuple[str, int, ast.FunctionDef]]:
    """Yield each change with the kind of mistake that it would undo."""
    nodes = [n for n in ast.walk(source.node) if isinstance(n, (ast.expr, ast.AugAssign))]
    for position, node in enumerate(nodes):
        for kind, replacement in _variants(node):
            tree = copy.deepcopy(source.node)
            old = [n for n in ast.walk(tree) if isinstance(n, (ast.expr, ast.AugAssign))][position]
            new = ast.copy_location(replacement, old)
            assert isinstance(tree, ast.FunctionDef), "a lambda was refused above"
            yield kind, node.lineno, _Replace(old, new).visit(tree)


def _variants(node: ast.expr | ast.AugAssign) -> Iterator[tuple[str, ast.expr | ast.AugAssign]]:
    match node:
        case ast.AugAssign(target=target, op=ast.Add(), value=value):
            yield "sign", ast.AugAssign(target, ast.Sub(), value)
        case ast.AugAssign(target=target, op=ast.Sub(), value=value):
            yield "sign", ast.AugAssign(target, ast.Add(), value)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            yield "sign", ast.BinOp(left, ast.Sub(), right)
            yield "sign", ast.BinOp(right, ast.Sub(), left)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            yield "sign", ast.BinOp(left, ast.Add(), right)
        case ast.BinOp(left=left, op=ast.MatMult(), right=right):
            yield "transposed", ast.BinOp(_attribute(left, "mT"), ast.MatMult(), right)
            yield "transposed", ast.BinOp(left, ast.MatMult(), _attribute(right, "mT"))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            yield "sign", operand
        case ast.Attribute(value=value, attr="T" | "mT"):
            yield "transposed", value
        case ast.Call(func=ast.Attribute(value=value, attr="t" | "transpose" | "swapaxes")):
            yield "transposed", value
        case ast.Call(func=ast.Attribute(value=value, attr="neg"), args=[]):
            yield "sign", value
        case ast.Call(func=ast.Attribute(value=value, attr="mean"), args=args, keywords=keywords):
            yield "bias_mean", ast.Call(_attribute(value, "sum"), args, keywords)
        case ast.Call(func=ast.Attribute(value=value, attr="detach"), args=[]):
            yield "detach", value
        case ast.Compare(left=left, ops=[op], comparators=comparators):
            flipped = {ast.Lt: ast.Gt, ast.Gt: ast.Lt, ast.LtE: ast.GtE, ast.GtE: ast.LtE}.get(type(op))
            if flipped:
                yield "sign", ast.Compare(left, [flipped()], comparators)
        # one row instead of the sum of all
        case ast.Subscript(value=value, slice=ast.Constant(value=0), ctx=ast.Load()):
            yield "broadcast", ast.Call(_attribute(value, "sum"), [ast.Constant(0)], [])
    if isinstance(node, ast.Call):
        yield from _other_calls(node)
    if isinstance(node, ast.BinOp):
        yield from _other_products(node)


def _other_calls(node: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    """Yield sums over other dimensions, and matrix products of a transposed operand."""
    if not isinstance(node.func, ast.Attribute):
        return
    name = node.func.attr
    if name in ("sum", "mean"):
        for position, argument in enumerate(node.args):
            for other in _other_dimensions(argument):
                args = [*node.args[:position], ast.Constant(other), *node.args[position + 1 :]]
                yield "broadcast", ast.Call(node.func, args, node.keywords)
        for position, keyword in enumerate(node.keywords):
            for other in _other_dimensions(keyword.value) if keyword.arg in ("dim", "axis") else ():
                changed = ast.keyword(keyword.arg, ast.Constant(other))
                keywords = [*node.keywords[:position], changed, *node.keywords[position + 1 :]]
                yield "broadcast", ast.Call(node.func, node.args, keywords)
    if name in PRODUCTS:
        for position, argument in enumerate(node.args):
            args = [*node.args[:position], _attribute(argument, "mT"), *node.args[position + 1 :]]
            yield "transposed", ast.Call(node.func, args, node.keywords)
        if len(node.args) == 1:  # a method of the left operand
            yield "transposed", ast.Call(_attribute(_attribute(node.func.value, "mT"), name), node.args, node.keywords)


def _other_dimensions(node: ast.expr) -> set[int]:
    """Return the dimensions other than a constant one; empty if the constant is not a dimension."""
    try:
        dimension = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        return set()
    is_dimension = isinstance(dimension, int) and not isinstance(dimension, bool)
    return {0, 1, -1} - {dimension} if is_dimension else set()


def _other_products(node: ast.BinOp) -> Iterator[tuple[str, ast.expr]]:
    """Yield a product without one factor or with its sum subtracted, and sums with a multiple of one operand."""
    left, right = node.left, node.right
    match node.op:
        case ast.Mult():
            yield "factor", left
            yield "factor", right
            total = ast.Call(
                _attribute(node, "sum"), [ast.Constant(-1)], [ast.keyword("keepdim", ast.Constant(value=True))]
            )
            yield "inner_product", ast.BinOp(left, ast.Mult(), ast.BinOp(right, ast.Sub(), total))
            yield "inner_product", ast.BinOp(ast.BinOp(left, ast.Sub(), total), ast.Mult(), right)
        case ast.Div():
            yield "factor", left
        case ast.Add() | ast.Sub():
            for number in LOST_FACTORS:
                lost = ast.Constant(number)
                yield "factor", ast.BinOp(left, node.op, ast.BinOp(lost, ast.Mult(), right))
                yield "factor", ast.BinOp(ast.BinOp(lost, ast.Mult(), left), node.op, right)


def _attribute(value: ast.expr, name: str) -> ast.Attribute:
    return ast.Attribute(value, name, ast.Load())


@final
class _Replace(ast.NodeTransformer):
    """Replace one node of a tree."""

    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self._old, self._new = old, new

    def visit(self, node: ast.AST) -> Any:
        return self._new if node is self._old else self.generic_visit(node)


def _compiled(tree: ast.FunctionDef, original: Any, file: str) -> Any:
    """Return a function of a changed tree with the names that the original sees."""
    tree.decorator_list = []
    module = ast.fix_missing_locations(ast.Module([tree], []))
    code = next(c for c in compile(module, file, "exec").co_consts if isinstance(c, types.CodeType))
    cells = zip(original.__code__.co_freevars, original.__closure__ or (), strict=True)
    names = {**original.__globals__, **{name: cell.cell_contents for name, cell in cells}}
    return types.FunctionType(code, names, original.__name__, original.__defaults__)


@contextmanager
def _instead(function: type[Function], backward: Any) -> Iterator[None]:
    own = function.__dict__.get("backward")
    function.backward = staticmethod(backward)  # type: ignore[method-assign]  # put back below
    try:
        yield
    finally:
        if own is None:
            del function.backward
        else:
            function.backward = own  # type: ignore[method-assign]  # as it was
