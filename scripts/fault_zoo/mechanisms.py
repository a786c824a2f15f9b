"""Find the mechanisms of the detectors and switch one off.

A mechanism is a function or a method of a detector that may return signs or findings, mark tensors or end a finding; or
a whole detector; or a kind of event that detectors read.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np

from gradwatch.detect import Detector, detector_classes
from gradwatch.events import EventKind

RETURNS = ("Sign", "Finding", "Recovery", "CollapsedRouter")
"""Names in the return annotation of a mechanism."""

JOINING = frozenset({"_signs", "_sign", "_find", "_findings", "_report", "_find_waves"})
"""Methods that pass on all signs of a detector, or of one function that is a mechanism itself."""


@dataclass(frozen=True)
class Mechanism:
    """Something that can be switched off.

    Attributes:
        name: `kind: function`, `kind`, or `event: kind`.
        lines: Lines of code that would go with it; 0 if they are not counted.
        functions: Each place that holds the function, as object and name.
        kind: Kind of the detector that is left out, or None.
        event: Kind of the events that are left out, or None.
    """

    name: str
    lines: int = 0
    functions: tuple[tuple[Any, str], ...] = ()
    kind: str | None = None
    event: str | None = None


@functools.cache
def mechanisms() -> tuple[Mechanism, ...]:
    """Return everything that can be switched off."""
    found: list[Mechanism] = []
    for cls in detector_classes():
        found.append(Mechanism(cls.kind, lines_of_detector(cls), kind=cls.kind))
        found += _functions_of(cls)
    inside = [module for name, module in sorted(sys.modules.items()) if name.startswith("gradwatch.detect.")]
    kinds = {value.name for module in inside for value in vars(module).values() if isinstance(value, EventKind)}
    return (*found, *(Mechanism(f"event: {kind}", event=kind) for kind in sorted(kinds)))


def _functions_of(cls: type[Detector]) -> Iterator[Mechanism]:
    """Yield the functions in the rules of a detector, and the methods of the detector, that are mechanisms."""
    rules = f"{cls.__module__}_rules."
    inside = [module for name, module in sorted(sys.modules.items()) if name.startswith(rules)]
    for module in inside:
        for name, value in sorted(vars(module).items()):
            is_own = isinstance(value, FunctionType) and value.__module__ == module.__name__
            if is_own and _may_find(value) and name != "findings_of":
                holders = [it for it in (sys.modules[cls.__module__], *inside) if vars(it).get(name) is value]
                places = tuple((holder, name) for holder in holders)
                yield Mechanism(f"{cls.kind}: {name.lstrip('_')}", lines_of_function(value), places)
    for name, value in sorted(vars(cls).items()):
        is_part = name.startswith("_") and name not in JOINING and isinstance(value, FunctionType)
        if is_part and _may_find(value):
            yield Mechanism(f"{cls.kind}: {name.lstrip('_')}", lines_of_function(value), ((cls, name),))


def _may_find(function: FunctionType) -> bool:
    """Return whether a function is a mechanism: it finds something or nothing, by its name and what it returns."""
    returns = str(inspect.signature(function).return_annotation)
    is_array = returns == "NDArray[np.bool_]" and function.__name__.startswith("find_")
    is_optional = returns.startswith(("Iterator", "list")) or returns.endswith("| None")
    return is_array or (is_optional and any(word in returns for word in RETURNS))


@contextlib.contextmanager
def replaced(mechanism: Mechanism, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Replace a function in all its places while the context is open."""
    originals = [getattr(holder, name) for holder, name in mechanism.functions]
    for (holder, name), original in zip(mechanism.functions, originals, strict=True):
        setattr(holder, name, make(original))
    try:
        yield
    finally:
        for (holder, name), original in zip(mechanism.functions, originals, strict=True):
            setattr(holder, name, original)


def silent(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that sees nothing."""
    returns = str(inspect.signature(function).return_annotation)
    if returns.startswith("Iterator"):
        return lambda *_, **__: iter(())
    if returns.startswith("list"):
        return lambda *_, **__: []
    if returns.startswith("NDArray"):
        return lambda *args, **options: np.zeros_like(function(*args, **options))
    return lambda *_, **__: None


def lines_of_detector(cls: type[Detector]) -> int:
    """Count the lines with statements in the module of a detector and in its rules."""
    module = Path(inspect.getfile(cls))
    return sum(map(_count, (ast.parse(path.read_text(encoding="utf-8")) for path in (module, *_rules_of(module)))))


def _rules_of(module: Path) -> list[Path]:
    return sorted(module.with_name(f"{module.stem}_rules").glob("*.py"))


def lines_of_function(function: FunctionType) -> int:
    """Count the lines with statements that would go with a function: its own, and those that nothing else uses."""
    tree = ast.parse(Path(inspect.getfile(function)).read_text(encoding="utf-8"))
    parts = {name: part for part in tree.body for name in _defined_by(part)}
    if "." in function.__qualname__:  # a method
        methods = [it for part in tree.body if isinstance(part, ast.ClassDef) for it in part.body]
        return sum(_count(it) for it in methods if isinstance(it, ast.FunctionDef) and it.name == function.__name__)
    is_entry = {name: not name.startswith("_") and isinstance(part, ast.FunctionDef) for name, part in parts.items()}
    others = [name for name, is_so in is_entry.items() if is_so and name != function.__name__]
    if not others:  # the module holds nothing else
        return _count(tree)
    left = {name: part for name, part in parts.items() if name != function.__name__}
    gone = _reached({function.__name__}, parts) - _reached(set(others), left)
    return sum(_count(part) for part in {id(parts[name]): parts[name] for name in gone}.values())


def _defined_by(part: ast.stmt) -> list[str]:
    if isinstance(part, ast.FunctionDef | ast.ClassDef):
        return [part.name]
    targets = part.targets if isinstance(part, ast.Assign) else [part.target] if isinstance(part, ast.AnnAssign) else []
    return [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]


def _reached(names: set[str], parts: dict[str, ast.stmt]) -> set[str]:
    """Return the names and all that their definitions use, directly or not."""
    reached, ahead = set[str](), set(names)
    while ahead:
        reached |= ahead
        used = {it.id for name in ahead for it in ast.walk(parts[name]) if isinstance(it, ast.Name)}
        ahead = (used & parts.keys()) - reached
    return reached


def _count(tree: ast.AST) -> int:
    return len({node.lineno for node in ast.walk(tree) if isinstance(node, ast.stmt)})
