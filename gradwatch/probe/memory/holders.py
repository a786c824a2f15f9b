"""Find the variable that keeps a tensor alive, and the line that puts the tensor there."""

from __future__ import annotations

import ast
import inspect
import linecache
from collections import deque
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn

from gradwatch.errors import is_users
from gradwatch.probe.graph.graph import Node
from gradwatch.probe.parameters import Models, named_modules
from gradwatch.probe.place import NOWHERE, Place, users_frames, variables_of

MAX_DEPTH = 3
"""Levels of containers and attributes to search below a variable."""

MAX_ITEMS = 64
"""Items of a container to search: a list of kept losses has them everywhere."""

WITHOUT_GRAPH = frozenset({"detach", "item", "numpy", "tolist"})
"""Methods whose result has no graph."""

MAX_OBJECTS = 20_000
"""Maximum number of objects to look at."""

ADDING = frozenset({"add", "append", "appendleft", "extend", "insert", "put", "setdefault", "update"})
"""Methods that put an object into a container."""

NOT_SEARCHED = (str, bytes, int, float, type, ModuleType, FunctionType, MethodType, CodeType)


class Holder(NamedTuple):
    """The owner of a tensor: a variable or attribute, and the line that puts the tensor there, if found."""

    name: str
    place: Place

    def __str__(self) -> str:
        return f"`{self.name}`, {self.place.with_text}" if self.place else f"`{self.name}`"


class _Root(NamedTuple):
    """A variable or an attribute of a module: where a search begins. A line of 0 is unknown."""

    name: str
    value: object
    file: str
    first_line: int
    current_line: int = 0


class _Kept(NamedTuple):
    root: _Root
    path: tuple[str, ...]  # attributes from the variable to the tensor or its container
    owner: object  # the object with the last attribute, or None
    node: Node


def find_holder(models: Models, keeps: Callable[[Node], bool]) -> Holder | None:
    """Return what keeps the graphs of earlier steps alive, or None if no variable in sight does.

    Variables of the user's functions on the stack are searched, then attributes of the models. If several tensors do,
    the one that the others are computed from is returned: a loss depends on a hidden state, and the loop keeps the
    hidden state.

    Args:
        models: A model, or several by name.
        keeps: Whether a node keeps the graph of an earlier step.
    """
    budget = [MAX_OBJECTS]
    found: list[_Kept] = []
    answers: dict[Node, bool] = {}
    for root in (*_variables(), *_attributes(models)):
        for kept in _tensors(root, root.value, (), None, budget):
            if kept.node not in answers:
                answers[kept.node] = keeps(kept.node)
            if answers[kept.node]:
                found.append(kept)
                break  # the next variable: a list of losses is found by its first
    origin = _innermost(found)
    if origin is None:
        return None
    name = ".".join((origin.root.name, *origin.path)).removeprefix(".")
    return Holder(name, _place(origin))


def _variables() -> Iterator[_Root]:
    for frame in users_frames():
        code, at_top = frame.f_code, frame.f_code.co_name == "<module>"
        for name, value in variables_of(frame).items():
            yield _Root(name, value, code.co_filename, 0 if at_top else code.co_firstlineno, frame.f_lineno)
        if not at_top:
            names = [name for name in code.co_names if name in frame.f_globals]
            yield from (_Root(name, frame.f_globals[name], code.co_filename, 0) for name in names)


def _attributes(models: Models) -> Iterator[_Root]:
    for name, module in named_modules(models):
        yield _Root(name or "model", module, "", 0)


def _tensors(
    root: _Root, value: object, path: tuple[str, ...], owner: object, budget: list[int], depth: int = MAX_DEPTH
) -> Iterator[_Kept]:
    """Yield the tensors with a graph in an object."""
    budget[0] -= 1
    if budget[0] < 0 or isinstance(value, NOT_SEARCHED):
        return
    if isinstance(value, Tensor):
        if value.grad_fn is not None:
            yield _Kept(root, path, owner, value.grad_fn)
        return
    if not depth:
        return
    # only dicts: another mapping may compute or load its values
    if isinstance(value, dict):
        items: list[Any] = [item for item, _ in zip(value.values(), range(MAX_ITEMS), strict=False)]
    elif isinstance(value, (list, tuple, set, deque)):
        items = [item for item, _ in zip(value, range(MAX_ITEMS), strict=False)]
    else:
        for name, part in list(getattr(value, "__dict__", {}).items()):
            if not (isinstance(value, nn.Module) and name in ("_parameters", "_buffers", "_modules")):
                yield from _tensors(root, part, (*path, name), value, budget, depth - 1)
        return
    for item in items:
        yield from _tensors(root, item, path, owner, budget, depth - 1)


def _innermost(found: list[_Kept]) -> _Kept | None:
    """Return the first of some tensors that depends on none of the others."""
    nodes = {kept.node for kept in found}
    return next((kept for kept in found if not _reaches(kept.node, nodes - {kept.node})), None)


def _reaches(root: Node, targets: set[Node]) -> bool:
    waiting, seen = [root], {root}
    while waiting and targets:
        new = [child for child, _ in waiting.pop().next_functions if child is not None and child not in seen]
        if not targets.isdisjoint(new):
            return True
        seen.update(new)
        waiting += new
    return False


def _place(kept: _Kept) -> Place:
    """Return the line that puts the tensor into its variable or attribute."""
    name = kept.path[-1] if kept.path else kept.root.name
    file, first_line = kept.root.file, kept.root.first_line
    if kept.path:
        try:
            file, first_line = inspect.getsourcefile(type(kept.owner)) or "", 0
        except (TypeError, OSError):
            return NOWHERE
    if not file or not is_users(file):
        return NOWHERE
    try:
        tree: ast.AST = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:  # a cell of a notebook with magic commands
        return NOWHERE
    for node in ast.walk(tree):
        if first_line and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and _begins(node, first_line):
            tree = node
    current_line = 0 if kept.path else kept.root.current_line
    writes = list(_writes(tree, name, is_attribute=bool(kept.path), current_line=current_line))
    return Place(file, max(writes)[1]) if writes else NOWHERE


def _begins(node: ast.FunctionDef | ast.AsyncFunctionDef, line: int) -> bool:
    # the code of a decorated function begins at its first decorator
    return line in (node.lineno, *(decorator.lineno for decorator in node.decorator_list))


def _writes(
    tree: ast.AST, name: str, *, is_attribute: bool, current_line: int
) -> Iterator[tuple[tuple[bool, bool, int], int]]:
    """Yield the lines that write to a variable or attribute, each with its rank: adding, then running and inner loops.

    Args:
        tree: Code of a function or file.
        name: Name of the variable or attribute.
        is_attribute: Whether it is an attribute.
        current_line: Line in progress: an evaluation in another loop may use a variable of the same name. 0 if unknown.
    """

    def is_target(node: ast.AST) -> bool:
        if isinstance(node, ast.Subscript):
            return is_target(node.value)
        if isinstance(node, (ast.Tuple, ast.List)):
            return any(map(is_target, node.elts))
        if is_attribute:
            return isinstance(node, ast.Attribute) and node.attr == name
        return isinstance(node, ast.Name) and node.id == name

    waiting = [(tree, True, 0)]
    while waiting:
        node, runs, loops = waiting.pop()
        if isinstance(node, (ast.For, ast.AsyncFor, ast.While)):
            runs = runs and (not current_line or node.lineno <= current_line <= (node.end_lineno or 0))
            loops += 1
        if isinstance(node, (ast.AugAssign, ast.Assign, ast.Call)) and _drops_graph(node):
            continue
        if isinstance(node, ast.AugAssign) and is_target(node.target):
            yield (True, runs, loops), node.lineno
        elif isinstance(node, ast.Assign) and any(map(is_target, node.targets)):
            yield (any(isinstance(target, ast.Subscript) for target in node.targets), runs, loops), node.lineno
        elif isinstance(node, ast.Call) and _added_to(node, is_target):
            yield (True, runs, loops), node.lineno
        waiting += [(child, runs, loops) for child in ast.iter_child_nodes(node)]


def _drops_graph(node: ast.AST) -> bool:
    return any(isinstance(part, ast.Attribute) and part.attr in WITHOUT_GRAPH for part in ast.walk(node))


def _added_to(call: ast.Call, is_target: Callable[[ast.AST], bool]) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr in ADDING and is_target(call.func.value)
