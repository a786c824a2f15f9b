"""Read the source of a function: the statement that makes one of its results, and statements of a given form."""

from __future__ import annotations

import ast
import inspect
import linecache
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

from gradwatch.probe.place import NOWHERE, Place


@final
@dataclass(frozen=True, slots=True)
class FunctionSource:
    """The syntax tree of a function, with the line numbers of its file.

    Args:
        file: The file.
        node: Definition of the function, or its lambda.
    """

    file: str
    node: ast.FunctionDef | ast.Lambda

    def place(self, node: ast.AST | None) -> Place:
        """Return the place of a node of the tree."""
        return NOWHERE if node is None else Place(self.file, node.lineno)  # type: ignore[attr-defined]  # a statement

    def statements(self) -> Iterator[ast.stmt]:
        """Yield the statements of the function in the order of their lines."""
        if isinstance(self.node, ast.FunctionDef):
            found = [n for n in ast.walk(self.node) if isinstance(n, ast.stmt) and n is not self.node]
            yield from sorted(found, key=lambda n: n.lineno)

    def simple(self, test: Callable[[ast.stmt], bool]) -> list[ast.stmt]:
        """Return the statements that pass a test, in order; compound statements by the part before their body."""
        return [s for s in self.statements() if test(_head(s))]

    def returned(self) -> list[tuple[ast.Return, list[ast.expr]]]:
        """Return each return statement with its elements."""
        found = []
        for statement in self.statements():
            if isinstance(statement, ast.Return) and statement.value is not None:
                value = statement.value
                found.append((statement, value.elts if isinstance(value, ast.Tuple) else [value]))
        return found

    def maker(self, wrong: Iterable[int], right: Iterable[int]) -> Place:
        """Return the statement that best explains which elements of the returned tuple are wrong.

        Args:
            wrong: Positions that are wrong.
            right: Positions that are right.
        """
        returns = self.returned()
        if not returns:
            return NOWHERE
        statement, elements = returns[-1]
        bad = [elements[i] for i in wrong if i < len(elements)]
        return self.common([(e, statement) for e in bad], [elements[i] for i in right if i < len(elements)])

    def common(self, bad: Sequence[tuple[ast.expr, ast.stmt]], good: Sequence[ast.expr]) -> Place:
        """Return the statement that explains wrong values: the last one on which all depend, and no right value does.

        Args:
            bad: Wrong values, each with the statement that it is written in.
            good: Right values.
        """
        if not bad:
            return NOWHERE
        slices = [self._slice(value) for value, _ in bad]
        spared = {id(s) for value in good for s in self._slice(value)}
        shared = [s for s in slices[0] if all(any(s is t for t in other) for other in slices) and id(s) not in spared]
        # a value that is computed where it is used, not only named there
        inline = [value for value, _ in bad if not isinstance(value, (ast.Name, ast.Constant))]
        if shared and inline and any(_form(value) == _form(inline[0]) for value in good):
            inline = []  # right values use the same statement
        if inline and (len(bad) == 1 or not shared):
            return self.place(inline[0])
        return self.place(max(shared, key=lambda s: s.lineno) if shared else bad[0][1])

    def made_by(self, statement: ast.stmt) -> Place:
        """Return the statement that computes a value which another statement only passes on, such as `p.grad = g`."""
        value = getattr(statement, "value", None)
        if not isinstance(value, ast.Name) or isinstance(statement, ast.AugAssign):
            return self.place(statement)
        made = [s for s in self._slice(value) if value.id in _targets(s)]
        return self.place(max(made, key=lambda s: s.lineno) if made else statement)

    def _slice(self, expression: ast.expr) -> list[ast.stmt]:
        """Return the assignments that an expression depends on, of computed values."""
        assignments = [s for s in self.statements() if isinstance(s, (ast.Assign, ast.AugAssign, ast.AnnAssign))]
        found: list[ast.stmt] = []
        pending = _names(expression)
        seen: set[str] = set()
        while pending:
            name = pending.pop()
            if name in seen:
                continue
            seen.add(name)
            for statement in assignments:
                if name in _targets(statement) and not _unpacks_saved(statement):
                    found.append(statement)
                    pending |= _names(statement)
        return found


NO_SOURCE = FunctionSource("", ast.parse("lambda: None", mode="eval").body)  # type: ignore[arg-type]  # a lambda
"""The source of functions without Python code in a file."""


def _form(expression: ast.expr) -> str:
    """Return an expression without the names in it."""
    return "".join(type(n).__name__ for n in ast.walk(expression))


def _names(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def _targets(statement: ast.stmt) -> set[str]:
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return {n.id for t in targets if t is not None for n in ast.walk(t) if isinstance(n, ast.Name)}


def _unpacks_saved(statement: ast.stmt) -> bool:
    """Return whether a statement only unpacks saved values."""
    value = getattr(statement, "value", None)
    return isinstance(value, ast.Attribute) or (
        isinstance(value, ast.Tuple) and all(isinstance(e, ast.Attribute) for e in value.elts)
    )


def _head(statement: ast.stmt) -> ast.stmt:
    """Return a statement without its body: the iterable of a loop, the condition of an `if`."""
    if not hasattr(statement, "body"):
        return statement
    value = getattr(statement, "iter", None) or getattr(statement, "test", None) or ast.Constant(None)
    return ast.copy_location(ast.Expr(value), statement)


def source_of(function: Any) -> FunctionSource:
    """Return the source of a Python function, or `NO_SOURCE`."""
    function = inspect.unwrap(getattr(function, "__func__", function))
    code = getattr(function, "__code__", None)
    if code is None:
        return NO_SOURCE
    try:
        lines, first = inspect.getsourcelines(code)
        tree = ast.parse(textwrap.dedent("".join(lines)).strip())
    except (OSError, TypeError, SyntaxError):
        return _lambda_source(code)
    ast.increment_lineno(tree, first - 1)
    wanted = ast.Lambda if code.co_name == "<lambda>" else ast.FunctionDef
    for node in ast.walk(tree):
        if isinstance(node, wanted):
            return FunctionSource(code.co_filename, node)
    return NO_SOURCE


def _lambda_source(code: Any) -> FunctionSource:
    """Return the lambda at the line of a code object: its statement may not parse by itself."""
    try:
        tree = ast.parse("".join(linecache.getlines(code.co_filename)))
    except SyntaxError:
        return NO_SOURCE
    nodes = [n for n in ast.walk(tree) if isinstance(n, (ast.Lambda, ast.FunctionDef))]
    here = [n for n in nodes if n.lineno <= code.co_firstlineno <= (n.end_lineno or n.lineno)]
    if not here:
        return NO_SOURCE
    return FunctionSource(code.co_filename, min(here, key=lambda n: (n.end_lineno or 0) - n.lineno))


def calls(statement: ast.AST, names: Iterable[str]) -> bool:
    """Return whether a statement calls a function or method of one of these names."""
    wanted = set(names)
    return any(isinstance(n, ast.Call) and called(n) in wanted for n in ast.walk(statement))


def written(statement: ast.AST) -> set[str]:
    """Return the names of variables whose tensors a statement changes in place."""
    found: set[str] = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = node.func.attr
            if name.endswith("_") and not name.endswith("__") and name not in ("requires_grad_", "detach_"):
                found |= _base_name(node.func.value)
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    found |= {n for t in targets if isinstance(t, ast.Subscript) for n in _base_name(t.value)}
    if isinstance(statement, ast.AugAssign):
        found |= _base_name(statement.target)
    return found


def _base_name(node: ast.AST) -> set[str]:
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return {node.id} if isinstance(node, ast.Name) else set()


def called(call: ast.Call) -> str:
    """Return the name that is called, without the part before its last dot."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def mentions(statement: ast.AST, words: Iterable[str]) -> bool:
    """Return whether a name or attribute of a statement contains one of these words."""
    return any(word in name.lower() for word in words for name in _words(statement))


def names_one(statement: ast.AST, words: Iterable[str]) -> bool:
    """Return whether a name or attribute of a statement is one of these words, or has it before or after a `_`."""
    wanted = set(words)
    return any(wanted & {name.lower(), *name.lower().split("_")} for name in _words(statement))


def _words(statement: ast.AST) -> list[str]:
    names = [n.id for n in ast.walk(statement) if isinstance(n, ast.Name)]
    return names + [n.attr for n in ast.walk(statement) if isinstance(n, ast.Attribute)]
