"""Collect the problems of a config as data, from validators and from pydantic's own errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import UnionType
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticCustomError

from gradwatch.config.wording import describe, describe_unknown, fields, settings, show, suggest_choice
from gradwatch.errors import Key, Problem


def raise_problems(found: Sequence[Problem], *, in_parent: bool = False) -> None:
    """Raise problems from a validator, if there are any, at keys below the validated value.

    Args:
        found: The problems.
        in_parent: Whether the keys belong to the mapping that holds the value, not to the value.

    Raises:
        PydanticCustomError: There is a problem; `problems_of` unpacks it.
    """
    if found:
        raise PydanticCustomError("problems", "see its context", {"found": tuple(found), "in_parent": in_parent})


def raise_problem(text: str, *, help: str = "", in_parent: bool = False) -> NoReturn:
    """Raise one problem from a validator, about the validated value or, `in_parent`, the mapping that holds it."""
    raise_problems([Problem((), text, help=help)], in_parent=in_parent)
    raise AssertionError("one problem is always raised")


def problems_of(error: ValidationError, *, data: Any, model: type[BaseModel]) -> list[Problem]:
    """Return the problems that pydantic found, one per key.

    Args:
        error: Error of pydantic.
        data: The validated data.
        model: Model that validated the data.
    """
    found: dict[Key, Problem] = {}
    of_unions = set()
    for details in error.errors(include_url=False):
        kind, location = details["type"], details["loc"]
        if kind in ("assertion_error", "value_error"):
            raise details["ctx"]["error"]  # not about the data: a bug of a validator
        if kind == "problems":
            location = location[:-1] if details["ctx"]["in_parent"] else location
            # `options` is a field of the model only: YAML has the options among the other settings; a class is the
            # member of a union
            last = str(location[-1]) if location else ""
            base = _key(location, data, may_be_missing=last != "options" and not last[:1].isupper())
            found |= {(*base, *p.key): p.below(*base) for p in details["ctx"]["found"]}
            continue
        key = _key(location, data, may_be_missing=kind == "missing")
        # one problem per key: each member of a union reports its own error
        found.setdefault(key, _problem(kind, key, data=data, model=model))
        if len(key) < len(location):  # the location also names a member of a union
            of_unions.add(key)
    deeper = {key[:i] for key in found for i in range(len(key))}
    # if a member of a union has a problem at a deeper key, the user meant that member
    return [problem for key, problem in found.items() if not (key in of_unions and key in deeper)]


def _key(location: Sequence[str | int], data: Any, *, may_be_missing: bool = False) -> Key:
    """Return the parts of a location that are in the data, since pydantic also names the members of unions.

    Positions in a list at the end are omitted: the problem is about the whole list.
    """
    key: list[str | int] = []
    for part in location:
        mapping = {} if data is None else data  # an empty section
        if isinstance(mapping, Mapping) and (part in mapping or (may_be_missing and part == location[-1])):
            key.append(part)
            data = mapping.get(part)
        elif isinstance(data, list | tuple) and isinstance(part, int) and part < len(data):
            key.append(part)
            data = data[part]
    while key and isinstance(key[-1], int):
        key.pop()
    return tuple(key)


def _problem(kind: str, key: Key, *, data: Any, model: type[BaseModel]) -> Problem:
    """Convert an error of pydantic, of the given kind and at a key, to a problem."""
    if kind == "extra_forbidden":
        section = _members(_field(model, key[:-1])[0])
        known = [name for member in section if _is_model(member) for name in settings(member)]
        return replace(describe_unknown(str(key[-1]), known=known), key=key)
    allowed, metadata = _field(model, key)
    expected = describe(allowed, metadata)
    for part in key:
        # the setting, or a section around it, is missing
        if data is None or (isinstance(data, Mapping) and part not in data):
            return Problem(key, f"missing, expected {expected}", is_about_key=True)
        data = data[part]
    choices = [str(c) for member in _members(allowed) if get_origin(member) is Literal for c in get_args(member)]
    # strict types reject 3.0 and 1e3 for an int
    is_whole = kind == "int_type" and isinstance(data, float) and data.is_integer()
    hint = f"write {int(data)}" if is_whole else suggest_choice(data, choices)
    return Problem(key, f"got {show(data)}, expected {expected}", help=hint)


def _field(model: type[BaseModel], key: Key) -> tuple[Any, Sequence[Any]]:
    allowed: Any = model
    metadata: Sequence[Any] = ()
    for part in key:
        allowed, metadata = next(_below(allowed, part), (Any, ()))
    return allowed, metadata


def _below(allowed: Any, part: str | int) -> Iterator[tuple[Any, Sequence[Any]]]:
    """Yield the type and metadata at a key or position in a type; for a union, of each member that has the key."""
    for member in _members(allowed):
        if _is_model(member) and part in fields(member):
            field = fields(member)[str(part)]
            yield field.annotation, field.metadata
        elif get_origin(member) in (list, tuple, dict):
            # a position in a list is an int: argument 0; a key of a dict is text: argument 1, its values
            yield get_args(member)[isinstance(part, str)], ()


def _members(allowed: Any) -> Iterator[Any]:
    """Yield the members of a union, or the type itself, without metadata."""
    if get_origin(allowed) is Annotated:
        yield from _members(get_args(allowed)[0])
    elif get_origin(allowed) in (Union, UnionType):
        for member in get_args(allowed):
            yield from _members(member)
    else:
        yield allowed


def _is_model(allowed: Any) -> bool:
    return isinstance(allowed, type) and issubclass(allowed, BaseModel)
