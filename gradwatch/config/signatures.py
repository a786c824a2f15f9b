"""Read the parameters of functions and classes from their source: a config is checked without importing anything."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from gradwatch.config import docstrings
from gradwatch.config.annotations import UNWRITABLE, of_default, to_type
from gradwatch.config.source import UNKNOWN, Source
from gradwatch.config.wording import show

_Callable = ast.ClassDef | ast.FunctionDef


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter of a function.

    Args:
        name: As written.
        type: Type of what YAML may say for it; UNWRITABLE where YAML has no words for it.
        required: Whether it has no default.
        default: Value of the default; UNKNOWN where there is none or it cannot be told.
        text: The default as written in the source; empty where there is none.
        doc: What the docstring's `Args` say of it.
        keyword_only: Whether it cannot be given by position.
    """

    name: str
    type: Any
    required: bool
    default: Any = UNKNOWN
    text: str = ""
    doc: str = ""
    keyword_only: bool = False

    def shown_default(self) -> str:
        """Return the default as YAML; as written in the source where its value cannot be told."""
        return self.text if self.default is UNKNOWN else show(self.default)


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """What a function or class may be given.

    Args:
        name: Name that a config calls it by.
        parameters: Those that a config may set.
        doc: Its whole docstring; empty where it has none.
        unusable: Why no config can use it; empty as a rule.
        is_open: Whether it takes keywords that its source does not name.
    """

    name: str
    parameters: tuple[Parameter, ...]
    doc: str = ""
    unusable: str = ""
    is_open: bool = False

    @property
    def summary(self) -> str:
        """The first sentence of the docstring, without markup."""
        return docstrings.summary(self.doc)


def read(
    source: Source,
    name: str,
    *,
    called: str = "",
    hidden: Collection[str] = (),
    types: Mapping[str, Any] = MappingProxyType({}),
) -> Signature:
    """Return the signature of a function or class.

    Keywords that it passes on (`**kwargs`) are followed to where they are named; a class without `__init__` has that
    of its base; a dataclass has its fields.

    Args:
        source: File that defines or imports it.
        name: Name of the function or class there.
        called: Name that a config calls it by; its own by default.
        hidden: Parameters that are not for a config to set, such as those that the harness gives itself.
        types: Types by the name of a parameter, in place of the annotated ones.
    """
    found = _definition(source, name)
    assert found, f"{source.path} has no function or class '{name}'"
    home, node = found
    parameters, is_open = _parameters(home, node)
    docs = docstrings.arguments(_docstring(home, node))
    if isinstance(node, ast.ClassDef) and (constructor := _constructor(home, node)):
        docs |= docstrings.arguments(ast.get_docstring(constructor[1]) or "")
    shown = [
        replace(p, doc=docs.get(p.name, ""), type=types.get(p.name, p.type))
        for p in parameters
        if p.name not in hidden and p.name[0] != "_"
    ]
    return Signature(
        name=called or name,
        parameters=tuple(p for p in shown if p.type is not UNWRITABLE),
        doc=_docstring(home, node),
        unusable=next((f"needs '{p.name}', which YAML cannot say" for p in shown if _cannot_be_given(p)), ""),
        is_open=is_open,
    )


def inputs(source: Source, name: str) -> tuple[str, ...]:
    """Return the names of the inputs that a class of modules takes: those of `forward` without default."""
    found = _definition(source, name)
    node = found[1] if found else None
    assert isinstance(node, ast.ClassDef), f"{source.path} has no class '{name}'"
    forward = _method(source, node, "forward")
    return tuple(p.name for p in _written(forward[0], forward[1]) if p.required) if forward else ()


def constants(node: ast.ClassDef) -> dict[str, str]:
    """Return the texts that are assigned in the body of a class, by name, such as `kind`."""
    texts = {}
    for statement in node.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str() as text)):
                texts[name] = text
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.Constant(value=str() as text)):
                texts[name] = text
    return texts


def _parameters(
    home: Source, node: _Callable, seen: frozenset[_Callable] = frozenset()
) -> tuple[list[Parameter], bool]:
    """Return all parameters of a function or class, and whether it takes keywords that are not in sight."""
    if node in seen:
        return [], False
    seen |= {node}
    if isinstance(node, ast.FunctionDef):
        return _with_forwarded(home, node, None, seen)
    if any(_name(decorator) == "dataclass" for decorator in node.decorator_list):
        return _fields(home, node), False
    constructor = _constructor(home, node)
    if not constructor:
        return [], False
    home, function, owner = constructor
    return _with_forwarded(home, function, owner, seen)


def _with_forwarded(
    home: Source, function: ast.FunctionDef, owner: ast.ClassDef | None, seen: frozenset[_Callable]
) -> tuple[list[Parameter], bool]:
    """Return the parameters that a function names, and those that its `**kwargs` reach."""
    parameters = {p.name: p for p in _written(home, function)}
    if not function.args.kwarg:
        return list(parameters.values()), False
    kwargs, is_open = function.args.kwarg.arg, False
    for call in (n for n in ast.walk(function) if isinstance(n, ast.Call)):
        if popped := _popped(home, call, kwargs):
            parameters.setdefault(popped.name, popped)
        elif any(k.arg is None and _name(k.value) == kwargs for k in call.keywords):
            callee = _callee(home, call.func, owner)
            reached, reached_open = _parameters(*callee, seen) if callee else ([], True)
            is_open |= reached_open
            for parameter in _unbound(reached, call):
                parameters.setdefault(parameter.name, parameter)
    return list(parameters.values()), is_open


def _written(home: Source, function: ast.FunctionDef) -> list[Parameter]:
    """Return the parameters that stand in a function's head, without `self` or `cls`."""
    args = function.args
    by_position = [*args.posonlyargs, *args.args]
    defaults: list[ast.expr | None] = [None] * (len(by_position) - len(args.defaults))
    defaults += args.defaults
    pairs = zip([*by_position, *args.kwonlyargs], [*defaults, *args.kw_defaults], strict=True)
    written = [_parameter(home, a.arg, a.annotation, default, a in args.kwonlyargs) for a, default in pairs]
    return [p for p in written if p.name not in ("self", "cls")]


def _parameter(
    home: Source, name: str, annotation: ast.expr | None, default: ast.expr | None, keyword_only: bool = True
) -> Parameter:
    value = UNKNOWN if default is None else home.value(default)
    if annotation is None:
        allowed = UNWRITABLE if default is not None and value is UNKNOWN else of_default(value)
    else:
        allowed = to_type(annotation, home)
        if value is None and allowed is not UNWRITABLE:
            allowed = allowed | None  # `x: int = None` means it
    return Parameter(
        name=name,
        type=allowed,
        required=default is None,
        default=value,
        text="" if default is None else ast.unparse(default),
        keyword_only=keyword_only,
    )


def _fields(home: Source, node: ast.ClassDef) -> list[Parameter]:
    """Return the fields of a dataclass, those of its bases first."""
    fields: dict[str, Parameter] = {}
    for base in _bases(home, node):
        fields |= {p.name: p for p in _parameters(*base)[0]}
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and "ClassVar" not in ast.unparse(statement.annotation):
            name, default = _name(statement.target), statement.value
            if isinstance(default, ast.Call) and _name(default.func) == "field":
                default = next((k.value for k in default.keywords if k.arg in ("default", "default_factory")), None)
            fields[name] = _parameter(home, name, statement.annotation, default)
    return list(fields.values())


def _popped(home: Source, call: ast.Call, kwargs: str) -> Parameter | None:
    """Return the parameter that `kwargs.pop("name", default)` takes, if the call is such a one."""
    match call:
        case ast.Call(
            func=ast.Attribute(value=ast.Name(id=owner), attr="pop" | "get"),
            args=[ast.Constant(value=str() as name), ast.expr() as default],
        ) if owner == kwargs:
            return _parameter(home, name, None, default)
    return None


def _unbound(parameters: list[Parameter], call: ast.Call) -> list[Parameter]:
    """Return the parameters that a call does not give itself."""
    given = {k.arg for k in call.keywords}
    by_position = [p.name for p in parameters if not p.keyword_only][: len(call.args)]
    return [p for p in parameters if p.name not in given and p.name not in by_position]


def _callee(home: Source, function: ast.expr, owner: ast.ClassDef | None) -> tuple[Source, _Callable] | None:
    """Return what a call calls: a function or class, the method of a class, or the base of `super().__init__`."""
    match function:
        case ast.Name(id=name):
            return _definition(home, name)
        case ast.Attribute(attr="__init__") if owner:
            return next(_bases(home, owner), None)
        case ast.Attribute(value=ast.Name(id=name), attr=attribute):
            found = _definition(home, name)
            method = _method(found[0], found[1], attribute) if found and isinstance(found[1], ast.ClassDef) else None
            return method and (method[0], method[1])
    return None


def _constructor(home: Source, node: ast.ClassDef) -> tuple[Source, ast.FunctionDef, ast.ClassDef] | None:
    return _method(home, node, "__init__")


def _method(home: Source, node: ast.ClassDef, name: str) -> tuple[Source, ast.FunctionDef, ast.ClassDef] | None:
    """Return a method of a class or of the nearest base that has it: its file, itself and its class."""
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == name:
            return home, statement, node
    inherited = (_method(base_home, base, name) for base_home, base in _bases(home, node))
    return next((method for method in inherited if method), None)


def _bases(home: Source, node: ast.ClassDef) -> Iterator[tuple[Source, ast.ClassDef]]:
    """Yield the base classes whose source is in sight."""
    for base in node.bases:
        found = _definition(home, _name(base))
        if found and isinstance(found[1], ast.ClassDef):
            yield found[0], found[1]


def _cannot_be_given(parameter: Parameter) -> bool:
    return parameter.required and parameter.type is UNWRITABLE


def _definition(home: Source, name: str) -> tuple[Source, _Callable] | None:
    found = home.find(name)
    return (found[0], found[1]) if found and not isinstance(found[1], ast.expr) else None


def _docstring(home: Source, node: _Callable) -> str:
    """Return a docstring, also one that is assigned to `__doc__` further down."""
    if (written := ast.get_docstring(node)) or node.name not in home.assigned_docs:
        return written or ""
    constants = [n for n in ast.walk(home.assigned_docs[node.name]) if isinstance(n, ast.Constant)]
    first = min(constants, key=lambda n: (n.lineno, n.col_offset), default=ast.Constant(""))
    return inspect.cleandoc(str(first.value))


def _name(node: ast.expr) -> str:
    """Return `c` of `c`, `a.b.c`, `c(...)` or `c[...]`; empty for anything else."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Call(func=inner) | ast.Subscript(value=inner):
            return _name(inner)
    return ""
