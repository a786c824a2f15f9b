"""Find things in Python source without importing it: parsed files, and the way along their imports."""

from __future__ import annotations

import ast
import gc
import importlib.util
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, final

from gradwatch.errors import GradwatchError

UNKNOWN: Any = object()
"""Value of an expression that cannot be told without running it."""

Definition = ast.ClassDef | ast.FunctionDef | ast.expr
"""What a name stands for: a class, a function, or the expression that it was assigned."""

_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.LShift: operator.lshift,
}


@dataclass(frozen=True, slots=True)
class _Import:
    module: str
    level: int
    name: str


@final
class Source:
    """One parsed file. Get it from `load`, which parses every file once.

    Args:
        path: A Python file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        collecting = gc.isenabled()
        gc.disable()  # a tree has no garbage, and looking for some takes half of the time
        try:
            self.tree = ast.parse(path.read_text(encoding="utf-8"))
        except SyntaxError as error:
            raise GradwatchError(f"{path}, line {error.lineno}: not valid Python: {error.msg}") from None
        finally:
            if collecting:
                gc.enable()

    def find(self, name: str) -> tuple[Source, Definition] | None:
        """Return the file that defines a name of this one, and the definition; None where neither is in sight."""
        known = self._names.get(name)
        if known is None:
            everything = (load(path).find(name) for star, path in self.imported() if star == "*")
            return next((found for found in everything if found), None)
        if isinstance(known, _Import):
            path = self._file_of(known)
            return load(path).find(known.name) if path else None
        return self, known

    def imported(self) -> Iterator[tuple[str, Path]]:
        """Yield the names that this file takes `from` elsewhere, each with its file; `*` where it takes everything."""
        for node in self._statements():
            for known in _imports(node):
                if path := self._file_of(known):
                    yield known.name, path

    def value(self, node: ast.expr) -> Any:
        """Return the value of a constant expression: literals, arithmetic and names of such; or UNKNOWN."""
        match node:
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                numbers = self.value(left), self.value(right)
                return UNKNOWN if UNKNOWN in numbers else _ARITHMETIC[type(op)](*numbers)
            case ast.Tuple(elts=items):
                values = tuple(self.value(item) for item in items)
                return UNKNOWN if UNKNOWN in values else values
            case ast.Name(id=name) if (found := self.find(name)) and isinstance(found[1], ast.expr):
                return found[0].value(found[1])
        try:
            return ast.literal_eval(node)
        except ValueError:
            return UNKNOWN

    @cached_property
    def assigned_docs(self) -> dict[str, ast.expr]:
        """What is assigned to the `__doc__` of classes and functions, by their names."""
        docs = {}
        for node in self._statements():
            match node:
                case ast.Assign(targets=[ast.Attribute(value=ast.Name(id=name), attr="__doc__")], value=value):
                    docs[name] = value
        return docs

    @cached_property
    def _names(self) -> dict[str, Definition | _Import]:
        names: dict[str, Definition | _Import] = {}
        for node in self._statements():
            match node:
                case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                    names[name] = node
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    names[name] = value
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                    names[name] = value
                case ast.ImportFrom(names=aliases):
                    local = [alias.asname or alias.name for alias in aliases]
                    names.update(zip(local, _imports(node), strict=True))
        return names

    def _statements(self) -> Iterator[ast.stmt]:
        """Yield the statements of the file, with those under `if TYPE_CHECKING:` and the like."""
        for node in self.tree.body:
            yield from node.body if isinstance(node, ast.If) else [node]

    def _file_of(self, known: _Import) -> Path | None:
        if not known.level:
            return locate(known.module)
        folder = self.path.parents[known.level - 1]
        return _file(folder.joinpath(*known.module.split("."))) if known.module else _file(folder / known.name)


@cache
def load(path: Path) -> Source:
    """Return a parsed file."""
    return Source(path)


@cache
def locate(module: str) -> Path | None:
    """Return the file of a module by its dotted name, or None; no package is imported for it."""
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return _file(Path(spec.submodule_search_locations[0]).joinpath(*rest))
    return Path(spec.origin) if spec.origin and spec.has_location else None


def _file(stem: Path) -> Path | None:
    """Return the file of the module or package that lies at a path without its suffix."""
    candidates = (stem.with_name(stem.name + ".py"), stem / "__init__.py")
    return next((path for path in candidates if path.is_file()), None)


def _imports(node: ast.stmt) -> list[_Import]:
    if not isinstance(node, ast.ImportFrom):
        return []
    return [_Import(node.module or "", node.level, alias.name) for alias in node.names]
