"""Check names in a config, and the settings that depend on them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from gradwatch.config.names.registry import TRANSFORMS
from gradwatch.config.names.signatures import Parameter, Signature
from gradwatch.config.names.spelling import known_spelling
from gradwatch.config.names.vocabulary import Entry, Vocabulary
from gradwatch.config.names.yaml_types import UNKNOWN
from gradwatch.config.problems import problems_of
from gradwatch.config.wording import describe_unknown, show
from gradwatch.errors import Key, Problem

ENABLED = Parameter(name="enabled", type=bool, required=False, default=True, text="True", doc="Whether it takes part.")
"""Setting of every detector and sink in addition to its own."""

_TARGET = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def find_usable(vocabulary: Vocabulary, name: Any) -> Entry | Problem:
    """Return the entry of a name, or the problem if a config cannot use the name."""
    entry = vocabulary.find(name) if isinstance(name, str) else None
    if entry is None:
        near = vocabulary.suggest(name) if isinstance(name, str) else ""
        return Problem((), f"got {show(name)}, expected {vocabulary.expected(str(name))}", help=near)
    if reason := entry.read().unusable:
        return Problem((), f"{entry.name} cannot be used here: it {reason}")
    return entry


def check_target(target: Any) -> str:
    """Return the problem with the form of a `target`, or an empty string. The target itself is imported later."""
    if isinstance(target, str) and _TARGET.fullmatch(target):
        return ""
    return f"got {show(target)}, expected package.module:factory"


def check_options(
    signature: Signature, options: Mapping[str, Any], *, others: Collection[str] = (), partial: bool = False
) -> tuple[dict[str, Any], list[Problem]]:
    """Check keyword arguments, and return them and their problems; lists become tuples where tuples are expected.

    Args:
        signature: Signature of the function or class.
        options: Keyword arguments as given in the config.
        others: Settings of the section itself, which a message may suggest.
        partial: Whether required arguments may be missing.
    """
    names = [p.name for p in signature.parameters]
    given: dict[str, Any] = {}
    written: dict[str, str] = {}  # the user's spelling of each setting, by which its line is found
    found: list[Problem] = []
    for key, value in options.items():
        name = known_spelling(str(key), names)  # a key of YAML or Python may be a number
        if name in written:
            text = f"{name} is set twice, in two spellings"
            found.append(Problem((key,), text, help="remove one", is_about_key=True))
        elif name in names or signature.is_open:
            given[name], written[name] = value, key
        else:
            found.append(describe_unknown(str(key), owner=signature.name, known=[*names, *others]))
    model = make_options_model(signature, partial=partial)
    try:
        # exclude_unset: only the settings that the config has are passed on
        checked = model.model_validate(given).model_dump(by_alias=True, exclude_unset=True)
    except ValidationError as error:
        checked = given  # unchecked, but the problems below end the loading anyway
        for problem in problems_of(error, data=given, model=model):
            first, *rest = problem.key
            found.append(replace(problem, key=(written.get(str(first), first), *rest)))
    return checked, found


@cache
def make_options_model(signature: Signature, *, partial: bool = False) -> type[BaseModel]:
    """Make a pydantic model of keyword arguments; names outside the signature are not checked."""
    fields: dict[str, Any] = {}
    for i, p in enumerate(signature.parameters):
        default = ... if p.required and not partial else None if p.default is UNKNOWN else p.default
        # aliases, because a parameter may have the name of a method of pydantic, such as `copy`
        fields[f"parameter_{i}"] = (p.type, Field(default=default, alias=p.name, description=p.doc or None))
    # extra: an open signature accepts any name; check_options has refused the names that a closed one lacks
    config = ConfigDict(strict=True, extra="allow", ser_json_inf_nan="constants")
    made: type[BaseModel] = create_model(signature.name, __config__=config, **fields)
    return made


def check_switches(vocabulary: Vocabulary, given: Any) -> tuple[dict[str, dict[str, Any]], list[Problem]]:
    """Check the settings of detectors or sinks, and return them by stored names, with their problems."""
    checked: dict[str, dict[str, Any]] = {}
    if not isinstance(given, Mapping):
        return checked, [
            Problem((), f"got {show(given)}, expected the settings of each {vocabulary.noun} below its name")
        ]
    found: list[Problem] = []
    for name, options in given.items():
        entry = find_usable(vocabulary, name)
        if isinstance(entry, Problem):
            found.append(replace(entry, key=(name,), is_about_key=True))
        elif not isinstance(options, Mapping | None):
            found.append(Problem((name,), f"got {show(options)}, expected a mapping such as {{enabled: false}}"))
        elif entry.name in checked:
            twice = f"{entry.name} is set twice, in two spellings"
            found.append(Problem((name,), twice, help="remove one", is_about_key=True))
        else:
            checked[entry.name], below = check_options(with_enabled(entry.read()), options or {})
            found += [p.below(name) for p in below]
            every = checked[entry.name].get("every", 1)
            # a sink of 0 steps is never due, but every detector has an interval
            if vocabulary.noun == "detector" and isinstance(every, int) and every < 1:
                text = f"got {show(every)}, expected a whole number of at least 1"
                found.append(Problem((name, "every"), text))
    return checked, found


@cache
def with_enabled(signature: Signature) -> Signature:
    """Return the signature of a detector or sink with the additional parameter `enabled`."""
    return Signature(name=signature.name, parameters=(ENABLED, *signature.parameters), doc=signature.doc)


def check_transforms(given: Sequence[Any]) -> tuple[list[Any], list[Problem]]:
    """Check transforms, and return them under their stored names, with their problems.

    Args:
        given: Each is a name, a mapping from a name to its keyword arguments, or a mapping with `target`.
    """
    checked: list[Any] = []
    found: list[Problem] = []
    for i, item in enumerate(given):
        transform, below = _check_transform(item)
        checked.append(transform)
        found += [p.below(i) for p in below]
    return checked, found


def _check_transform(item: Any) -> tuple[Any, list[Problem]]:
    if isinstance(item, Mapping) and "target" in item:
        wrong = check_target(item["target"])
        return item, [Problem(("target",), wrong)] if wrong else []
    if isinstance(item, Mapping) and len(item) == 1:
        ((name, options),) = item.items()
        above: Key = (name,)
    else:
        name, options, above = item, None, ()
    if not isinstance(name, str) or not isinstance(options, Mapping | None):
        text = f"got {show(item)}, expected a name, or a mapping from a name to its keyword arguments"
        return item, [Problem((), text)]
    entry = find_usable(TRANSFORMS, name)
    if isinstance(entry, Problem):
        return item, [replace(entry, key=above, is_about_key=bool(above))]
    checked, found = check_options(entry.read(), options or {})
    if isinstance(nested := checked.get("transforms"), list):  # of a container such as RandomApply
        checked["transforms"], inside = check_transforms(nested)
        found += [p.below("transforms") for p in inside]
    return {entry.name: checked} if checked else entry.name, [p.below(*above) for p in found]
