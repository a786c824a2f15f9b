"""Turn a written annotation into a type that checks what YAML can say: numbers, text, lists and mappings of them."""

from __future__ import annotations

import ast
from types import NoneType
from typing import Annotated, Any, Literal, Union, get_args

from pydantic import Strict

from gradwatch.config.source import Source

UNWRITABLE: Any = object()
"""Stands for the type of what YAML cannot say, such as a function or a module."""

_SCALARS: dict[str, Any] = {
    "Any": Any,
    "Number": int | float,
    "Path": str,
    "PathLike": str,
    "bool": bool,
    "float": float,
    "int": int,
    "object": Any,
    "str": str,
}
_LISTS = ("Iterable", "List", "Sequence", "list")
_TUPLES = ("Tuple", "tuple")
_MAPPINGS = ("Dict", "Mapping", "dict")
_DTYPES = ("float16", "bfloat16", "float32", "float64", "uint8", "int8", "int16", "int32", "int64", "bool")

# typing's own forms, seen as Any, so that they take arguments that are made here
_Union: Any = Union
_Literal: Any = Literal
_Annotated: Any = Annotated

_TENSOR = "a tensor, written as a list"
_MEMBER = "a member of an enumeration, written as text"


def to_type(node: ast.expr, source: Source) -> Any:
    """Return the type of what YAML may say where an annotation stands, or UNWRITABLE.

    A torch dtype is written by its name; a member of an enumeration by its value where that is text, else by its
    name; a tensor, where nothing simpler is allowed, as a list of numbers. Of a union remains what YAML can say.

    Args:
        node: The annotation.
        source: Where it is written, to look up the names in it.
    """
    match node:
        case ast.Constant(value=None):
            return NoneType
        case ast.Constant(value=str() as text):
            return to_type(ast.parse(text, mode="eval").body, source)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _either([to_type(left, source), to_type(right, source)])
        case ast.Subscript(value=generic, slice=index):
            arguments = index.elts if isinstance(index, ast.Tuple) else [index]
            return _generic(_last_name(generic), arguments, source)
        case ast.Name() | ast.Attribute():
            return _plain(_last_name(node), source)
    return UNWRITABLE


def of_default(value: Any) -> Any:
    """Return the type for a parameter without annotation, judged by its default; 0 may be a fraction too."""
    if isinstance(value, bool | str):
        return type(value)
    return int | float if isinstance(value, int | float) else Any


def _plain(name: str, source: Source) -> Any:
    if name in _SCALARS:
        return _SCALARS[name]
    if name in _LISTS:
        return list[Any]
    if name in _TUPLES:
        return _from_list(tuple[Any, ...])
    if name in _MAPPINGS:
        return dict[str, Any]
    if name == "Tensor":
        return Annotated[list[float], _TENSOR]
    if name == "dtype":
        return _Literal[_DTYPES]
    match source.find(name):
        case (home, ast.ClassDef() as node):
            return _enumeration(node, home)
        case (home, ast.expr() as alias):
            return to_type(alias, home)
    return UNWRITABLE


def _generic(name: str, arguments: list[ast.expr], source: Source) -> Any:
    if name == "Literal":
        return _Literal[tuple(source.value(argument) for argument in arguments)]
    if name == "Annotated":
        return to_type(arguments[0], source)
    types = [to_type(a, source) for a in arguments if not (isinstance(a, ast.Constant) and a.value is ...)]
    if name in ("Optional", "Union"):
        return _either([*types, NoneType] if name == "Optional" else types)
    if UNWRITABLE in types:
        return UNWRITABLE
    if name in _LISTS:
        return list.__class_getitem__(types[0])
    if name in _TUPLES:
        many = len(types) < len(arguments)  # tuple[int, ...]
        return _from_list(tuple.__class_getitem__((types[0], ...) if many else tuple(types)))
    if name in _MAPPINGS and types[0] in (str, Any):
        return dict.__class_getitem__((str, types[1]))
    return UNWRITABLE


def _either(types: list[Any]) -> Any:
    """Return the union of those types that YAML can say."""
    types = [t for t in types if t is not UNWRITABLE]
    values = [t for t in types if t is not NoneType]
    if not values:
        return UNWRITABLE
    if any(_MEMBER in get_args(t) for t in types):
        types = [t for t in types if t is not str]  # the members are all the text that has a meaning
    if any(_TENSOR not in get_args(t) for t in values):
        types = [t for t in types if _TENSOR not in get_args(t)]
    return _Union[tuple(types)]


def _enumeration(node: ast.ClassDef, source: Source) -> Any:
    """Return the type of an enumeration's members as text, or UNWRITABLE for any other class."""
    if not any("Enum" in _last_name(base) for base in node.bases):
        return UNWRITABLE
    members = [
        (target.id, source.value(value))
        for statement in node.body
        if isinstance(statement, ast.Assign)
        for target, value in [(statement.targets[0], statement.value)]
        if isinstance(target, ast.Name)
    ]
    names = tuple(value if isinstance(value, str) else name for name, value in members)
    return _Annotated[_Literal[names], _MEMBER] if names else UNWRITABLE


def _from_list(sequence: Any) -> Any:
    return _Annotated[sequence, Strict(False)]  # YAML has lists only


def _last_name(node: ast.expr) -> str:
    """Return `c` of `a.b.c`; empty for anything but a name."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
