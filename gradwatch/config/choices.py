"""Check what depends on a name: whether there is such a thing, and whether it takes the settings that it is given."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from gradwatch.config.known import TRANSFORMS
from gradwatch.config.problems import Key, Problem, explain
from gradwatch.config.signatures import Parameter, Signature
from gradwatch.config.source import UNKNOWN
from gradwatch.config.vocabulary import Entry, Vocabulary
from gradwatch.config.wording import show, unknown

ENABLED = Parameter(name="enabled", type=bool, required=False, default=True, text="True", doc="Whether it takes part.")
"""What every detector and sink can be told beside its own settings."""

_TARGET = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def find(vocabulary: Vocabulary, name: Any) -> Entry | str:
    """Return the entry of a name, or what is wrong with the name."""
    entry = vocabulary.find(name) if isinstance(name, str) else None
    if entry is None:
        near = vocabulary.nearest(name) if isinstance(name, str) else ""
        return f"got {show(name)}, expected {vocabulary.expected()}{near}"
    if reason := entry.read().unusable:
        return f"{entry.name} cannot be used here: it {reason}"
    return entry


def check_target(target: Any) -> str:
    """Return what is wrong with the form of a `target`, or an empty string. It is imported later."""
    if isinstance(target, str) and _TARGET.fullmatch(target):
        return ""
    return f"got {show(target)}, expected package.module:factory"


def check_options(
    signature: Signature, options: Mapping[str, Any], *, beside: Collection[str] = (), partial: bool = False
) -> tuple[dict[str, Any], list[Problem]]:
    """Return keyword arguments with lists made tuples where those are expected, and what is wrong with them.

    Args:
        signature: What takes them.
        options: Those that a config gives.
        beside: Settings of the section that may have been meant.
        partial: Whether required ones may be left out.
    """
    known = {p.name for p in signature.parameters}
    strange = [] if signature.is_open else [key for key in options if key not in known]
    names = [*(p.name for p in signature.parameters), *beside]
    found: list[Problem] = [((key,), unknown(key, owner=signature.name, known=names)) for key in strange]
    given = {key: value for key, value in options.items() if key not in strange}
    model = options_model(signature, partial=partial)
    try:
        checked = model.model_validate(given).model_dump(by_alias=True, exclude_unset=True)
    except ValidationError as error:
        checked = given
        found += explain(error, data=given, model=model)
    return checked, found


def options_model(signature: Signature, *, partial: bool = False) -> type[BaseModel]:
    """Return a pydantic model of keyword arguments; what is not in the signature passes unchecked."""
    fields: dict[str, Any] = {}
    for i, p in enumerate(signature.parameters):
        default = ... if p.required and not partial else None if p.default is UNKNOWN else p.default
        # aliases, since a parameter may be called what a pydantic model has for itself, such as `copy`
        fields[f"parameter_{i}"] = (p.type, Field(default=default, alias=p.name, description=p.doc or None))
    config = ConfigDict(strict=True, extra="allow", ser_json_inf_nan="constants")
    made: type[BaseModel] = create_model(signature.name, __config__=config, **fields)
    return made


def check_switches(vocabulary: Vocabulary, given: Any) -> tuple[dict[str, dict[str, Any]], list[Problem]]:
    """Return settings by the stored names of detectors or sinks, and what is wrong with them."""
    checked: dict[str, dict[str, Any]] = {}
    if not isinstance(given, Mapping):
        return checked, [((), f"got {show(given)}, expected the settings of each {vocabulary.noun} below its name")]
    found: list[Problem] = []
    for name, options in given.items():
        entry = find(vocabulary, name)
        if isinstance(entry, str):
            found.append(((name,), entry))
        elif not isinstance(options, Mapping | None):
            found.append(((name,), f"got {show(options)}, expected a mapping such as {{enabled: false}}"))
        elif entry.name in checked:
            found.append(((name,), f"{entry.name} is set twice, in two spellings"))
        else:
            checked[entry.name], below = check_options(switchable(entry.read()), options or {})
            found += [((name, *key), text) for key, text in below]
    return checked, found


def switchable(signature: Signature) -> Signature:
    """Return the signature of a detector or sink with the setting that they all have."""
    return Signature(name=signature.name, parameters=(ENABLED, *signature.parameters), doc=signature.doc)


def check_transforms(given: Sequence[Any]) -> tuple[list[Any], list[Problem]]:
    """Return transforms under their stored names, and what is wrong with them.

    Args:
        given: Each a name, a mapping from a name to its keyword arguments, or a mapping with `target`.
    """
    checked: list[Any] = []
    found: list[Problem] = []
    for i, item in enumerate(given):
        transform, below = _check_transform(item)
        checked.append(transform)
        found += [((i, *key), text) for key, text in below]
    return checked, found


def _check_transform(item: Any) -> tuple[Any, list[Problem]]:
    if isinstance(item, Mapping) and "target" in item:
        wrong = check_target(item["target"])
        return item, [(("target",), wrong)] if wrong else []
    if isinstance(item, Mapping) and len(item) == 1:
        ((name, options),) = item.items()
        below: Key = (name,)
    else:
        name, options, below = item, None, ()
    if not isinstance(name, str) or not isinstance(options, Mapping | None):
        return item, [((), f"got {show(item)}, expected a name, or a mapping from a name to its keyword arguments")]
    entry = find(TRANSFORMS, name)
    if isinstance(entry, str):
        return item, [(below, entry)]
    checked, found = check_options(entry.read(), options or {})
    if isinstance(nested := checked.get("transforms"), list):
        checked["transforms"], inside = check_transforms(nested)
        found += [(("transforms", *key), text) for key, text in inside]
    return {entry.name: checked} if checked else entry.name, [((*below, *key), text) for key, text in found]
