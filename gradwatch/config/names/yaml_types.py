"""Convert an annotation to a type that checks YAML values: numbers, text, lists and mappings of them."""

from __future__ import annotations

import ast
from types import NoneType
from typing import Annotated, Any, Literal, Union, final, get_args

import griffe
from pydantic import Strict

from gradwatch.config.names.sources import resolve

UNKNOWN: Any = object()
"""Value of an expression that can be evaluated only at run time."""


@final
class Unwritable:
    """Type of values that cannot be written in YAML, such as a function or a module."""


_LISTS = ("Iterable", "List", "Sequence", "list")
_TUPLES = ("Tuple", "tuple")
_MAPPINGS = ("Dict", "Mapping", "dict")
_DTYPES = ("float16", "bfloat16", "float32", "float64", "uint8", "int8", "int16", "int32", "int64", "bool")
_TENSOR: Any = Annotated[list[float], "a tensor, written as a list"]
_MEMBER = "a member of an enumeration, written as text"
_NAMED: dict[str, Any] = {
    **dict.fromkeys(("Any", "object"), Any),
    **dict.fromkeys(("Path", "PathLike", "str"), str),
    **dict.fromkeys(_LISTS, list[Any]),
    **dict.fromkeys(_TUPLES, Annotated[tuple[Any, ...], Strict(False)]),  # YAML has lists only
    **dict.fromkeys(_MAPPINGS, dict[str, Any]),
    "Number": int | float,
    "Tensor": _TENSOR,
    "bool": bool,
    "dtype": Literal[_DTYPES],
    "float": float,
    "int": int,
}
"""Types by the last part of a name in an annotation."""

# typing's own forms, declared as Any, so that mypy accepts arguments that are computed here
_Union: Any = Union
_Literal: Any = Literal
_Annotated: Any = Annotated


def to_type(annotation: str | griffe.Expr, scope: griffe.Object) -> Any:
    """Return the type of the YAML values for an annotation, or Unwritable.

    YAML has the name of a torch dtype. A member of an enumeration is its value if that is text, else its name. A
    tensor is a list of numbers, unless a simpler type is allowed. A union keeps the members that YAML can express.

    Args:
        annotation: Annotation as parsed by griffe.
        scope: Object that contains the annotation, to look up the names in it.
    """
    match annotation:
        case "None":
            return NoneType
        case griffe.ExprBinOp(left=left, operator="|", right=right):
            return _either([to_type(left, scope), to_type(right, scope)])
        case griffe.ExprSubscript(left=generic, slice=griffe.ExprTuple(elements=arguments)):
            return _generic(_last_part(generic), list(arguments), scope)
        case griffe.ExprSubscript(left=generic, slice=argument):
            return _generic(_last_part(generic), [argument], scope)
        case griffe.ExprName() | griffe.ExprAttribute():
            return _named(_last_part(annotation), scope)
    return Unwritable


def type_of_default(value: Any) -> Any:
    """Return the type of a parameter without annotation from its default; a default of 0 allows fractions too."""
    if value is UNKNOWN:
        return Unwritable
    if isinstance(value, bool | str):
        return type(value)
    return int | float if isinstance(value, int | float) else Any


def to_value(expression: str | griffe.Expr, scope: griffe.Object) -> Any:
    """Evaluate a constant expression of literals, fractions, tuples and names of constants, or return UNKNOWN."""
    match expression:
        case griffe.ExprTuple(elements=items):
            values = tuple(to_value(item, scope) for item in items)
            return UNKNOWN if UNKNOWN in values else values
        # a default such as `1.0 / 3` in torch, which literal_eval rejects
        case griffe.ExprBinOp(left=left, operator="/", right=right):
            numbers = to_value(left, scope), to_value(right, scope)
            return UNKNOWN if UNKNOWN in numbers else numbers[0] / numbers[1]
        case griffe.ExprName(name=name) if isinstance(found := resolve(scope, name), griffe.Attribute) and found.parent:
            return UNKNOWN if found.value is None else to_value(found.value, found.parent)
    try:
        return ast.literal_eval(str(expression))
    except ValueError:
        return UNKNOWN


def _named(name: str, scope: griffe.Object) -> Any:
    """Return the type of a name: a known type, an alias such as `Fill = int | float`, or an enumeration."""
    if name in _NAMED:
        return _NAMED[name]
    found = resolve(scope, name)
    if isinstance(found, griffe.Attribute) and found.value is not None and found.parent:
        return to_type(found.value, found.parent)
    # by the name of the base, since the source of the enum module is not loaded
    if isinstance(found, griffe.Class) and any("Enum" in str(base) for base in found.bases):
        members = [m for m in found.members.values() if isinstance(m, griffe.Attribute)]
        values = {m.name: to_value(m.value or "", found) for m in members}
        return _Annotated[_Literal[tuple(v if isinstance(v, str) else name for name, v in values.items())], _MEMBER]
    return Unwritable


def _generic(name: str, arguments: list[str | griffe.Expr], scope: griffe.Object) -> Any:
    if name == "Literal":
        return _Literal[tuple(to_value(a, scope) for a in arguments)]
    types = [to_type(a, scope) for a in arguments if a != "..."]
    if name == "Annotated":
        return types[0]  # without the metadata, which only the annotated code understands
    if name in ("Optional", "Union"):
        return _either([*types, NoneType] if name == "Optional" else types)
    if Unwritable in types:
        return Unwritable
    if name in _LISTS:
        return list.__class_getitem__(types[0])  # list[...] with a computed argument is an error for mypy
    if name in _TUPLES:
        items = (types[0], ...) if "..." in arguments else tuple(types)
        return _Annotated[tuple.__class_getitem__(items), Strict(False)]
    if name in _MAPPINGS and types[0] in (str, Any):
        return dict.__class_getitem__((str, types[1]))
    return Unwritable


def _either(types: list[Any]) -> Any:
    """Return the union of the types that YAML can express, or Unwritable."""
    types = [t for t in types if t is not Unwritable]
    values = [t for t in types if t is not NoneType]
    if not values:
        return Unwritable
    if any(_MEMBER in get_args(t) for t in types):
        types = [t for t in types if t is not str]  # only the members are valid text
    if any(t != _TENSOR for t in values):  # a simpler type is enough, see to_type
        types = [t for t in types if t != _TENSOR]
    return _Union[tuple(types)]


def _last_part(name: str | griffe.Expr) -> str:
    """Return `dtype` of `torch.dtype`."""
    return str(name).rpartition(".")[2]
