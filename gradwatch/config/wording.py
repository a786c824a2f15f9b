"""Word the parts of messages: values as YAML, types in plain English, and suggestions for names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from gradwatch.errors import Problem, did_you_mean

_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    int | float: "a number",
    bool: "true or false",
    str: "text",
    Path: "a path",
    NoneType: "null",
}
_MAX_VALUE_CHARS = 60
_MIN_SIMILARITY = 0.8  # one wrong letter in five
_MIN_CHOICE_SIMILARITY = 0.5  # choices are few and short: `fp8` is two letters from `fp16`


@dataclass(frozen=True, slots=True)
class Expected:
    """Metadata of a field: a description of the expected value, instead of one derived from the type."""

    words: str


def show(value: Any) -> str:
    """Return a value as YAML on one line, with text in quotes, truncated to 60 characters."""
    if isinstance(value, str):
        shown = repr(value)
    else:
        try:
            dumped = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), sort_keys=False)
        except yaml.YAMLError:  # a value of a Python call that YAML does not have, such as an array
            dumped = f"an object of type {type(value).__name__}"
        shown = dumped.removesuffix("\n").removesuffix("\n...")  # PyYAML ends a single scalar with `...`
    return shown if len(shown) <= _MAX_VALUE_CHARS else shown[: _MAX_VALUE_CHARS - 3] + "..."


def describe_unknown(name: str, *, owner: str = "", known: Iterable[str]) -> Problem:
    """Return the problem for an unknown key.

    Args:
        name: The key.
        owner: Name of the object that does not have the setting, such as `AdamW`; empty for a section.
        known: The known keys.
    """
    names = list(known)
    setting = f"unknown setting of {owner}" if owner else "unknown setting"
    text = f"{setting}, expected {list_choices(names)}"
    return Problem((name,), text, help=suggest(name, names), is_about_key=True)


def suggest(name: str, known: Iterable[str]) -> str:
    """Return `did you mean 'x'?` with the best known name, or an empty string.

    Order of preference: nearly equal names; initials (`learning_rate` and `lr`); names with additional or missing
    words (`num_workers` and `workers`); the most similar name.
    """
    known = list(known)
    by_folded = {candidate.casefold(): candidate for candidate in known}
    for alike in difflib.get_close_matches(name.casefold(), by_folded, n=1, cutoff=_MIN_SIMILARITY):
        return f"did you mean '{by_folded[alike]}'?"
    for is_like in (_is_initials, _has_words_of):
        for candidate in known:
            if is_like(name.casefold(), candidate.casefold()) or is_like(candidate.casefold(), name.casefold()):
                return f"did you mean '{candidate}'?"
    return did_you_mean(name, known).removeprefix("; ")


def suggest_choice(value: Any, choices: Sequence[str]) -> str:
    """Return `did you mean 'x'?` with the best choice, or an empty string."""
    if not isinstance(value, str) or not choices:
        return ""
    if near := suggest(value, choices):
        return near
    # of two equally similar choices the later one: `fp8` is as near to fp32 as to fp16, the smaller format
    best = max(reversed(choices), key=lambda choice: similarity(value, choice))
    return f"did you mean '{best}'?" if similarity(value, best) >= _MIN_CHOICE_SIMILARITY else ""


def similarity(first: str, second: str) -> float:
    """Return the similarity of two names, 0..1, regardless of case."""
    return difflib.SequenceMatcher(None, first.casefold(), second.casefold()).ratio()


def list_choices(names: Sequence[str]) -> str:
    """Return `'a'` or `one of a, b, c`."""
    return f"one of {', '.join(names)}" if len(names) > 1 else f"'{names[0]}'" if names else "none"


def describe(allowed: Any, metadata: Iterable[Any] = ()) -> str:
    """Describe a type, such as `a whole number of at least 1, or null`."""
    metadata = list(_flat(metadata))
    for item in metadata:
        if isinstance(item, Expected):
            return item.words
    origin, arguments = get_origin(allowed), get_args(allowed)
    if origin is Annotated:
        return describe(arguments[0], [*arguments[1:], *metadata])
    if origin is Literal:
        return list_choices([str(a) for a in arguments])
    if allowed in _WORDS:
        return _WORDS[allowed] + _range(metadata, whole=allowed is int)
    if origin in (Union, UnionType):
        return _either(arguments)
    if origin in (list, tuple):
        return _list(arguments)
    if isinstance(allowed, type) and issubclass(allowed, BaseModel):
        return f"a mapping with {', '.join(settings(allowed))}"
    return "a mapping" if origin is dict else "a value"


def fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the fields of a model by the names that a config uses."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def settings(model: type[BaseModel]) -> list[str]:
    """Return the names of a model's fields that a config may set."""
    return [name for name in fields(model) if name != "options"]  # in YAML, options are among the other settings


def _is_initials(short: str, long: str) -> bool:
    words = _words(long)
    return len(words) > 1 and short == "".join(word[:1] for word in words)


def _has_words_of(short: str, long: str) -> bool:
    words, wanted = _words(long), _words(short)
    return any(words[i : i + len(wanted)] == wanted for i in range(len(words)))


def _words(name: str) -> list[str]:
    return name.replace("-", "_").split("_")


def _either(members: Sequence[Any]) -> str:
    """Describe the members of a union, null last."""
    # dict.fromkeys drops repetitions: int | float describes both as a number
    said = list(dict.fromkeys(describe(member) for member in members if member is not NoneType))
    if NoneType in members:
        said.append("null")
    return said[0] if len(said) == 1 else f"{', '.join(said[:-1])}, or {said[-1]}"


def _list(arguments: Sequence[Any]) -> str:
    """Describe a list, of any length (`[int]`, `[int, ...]`) or with one item per type."""
    items = [describe(a) for a in arguments if a is not ...]
    if len(arguments) == 1 or len(items) < len(arguments):
        return f"a list, each {items[0]}"
    return f"a list of {len(items)}" + (f", each {items[0]}" if len(set(items)) == 1 else f": {', '.join(items)}")


def _range(metadata: Iterable[Any], *, whole: bool) -> str:
    """Describe the limits of a number, with a leading space."""
    words = []
    for item in metadata:
        match item:
            case annotated_types.Ge(ge=limit):
                words.append(f"of at least {limit}")
            case annotated_types.Gt(gt=int(limit)) if whole:
                words.append(f"of at least {limit + 1}")  # for whole numbers, clearer than `above 0`
            case annotated_types.Gt(gt=limit):
                words.append(f"above {limit}")
            case annotated_types.Le(le=limit):
                words.append(f"at most {limit}")
            case annotated_types.Lt(lt=limit):
                words.append(f"below {limit}")
    return " " + " and ".join(words) if words else ""


def _flat(metadata: Iterable[Any]) -> Iterator[Any]:
    for item in metadata:
        if isinstance(item, FieldInfo):
            yield from item.metadata
        else:
            yield item
