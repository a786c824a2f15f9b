"""Write the table of every setting of a config from its JSON schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from gradwatch.config.names import registry
from scripts.reference_pages.markdown import cell, table

Schema = dict[str, Any]

NAMED = {
    "model": registry.MODELS,
    "data": registry.DATA,
    "loss": registry.LOSSES,
    "optim": registry.OPTIMIZERS,
    "schedule": registry.SCHEDULES,
    "sinks": registry.SINKS,
}
"""Sections whose further settings depend on a name."""

TYPES = {"string": "text", "boolean": "`true`, `false`", "array": "list"}


def config_page(schema: Schema) -> str:
    """Return one section of the page for each section of a config.

    Args:
        schema: As `gradwatch schema` prints it.
    """
    parts = []
    for key, given in schema["properties"].items():
        section = _resolve(schema, given)
        required = " Required." if key in schema.get("required", ()) else ""
        parts.append(f"## {key}\n\n{cell(section.get('description', ''))}{required}")
        if key == "detect":
            parts.append("Each kind of finding has a page with its thresholds: see [all kinds](faults.md).")
            continue
        if key != "sinks":
            parts.append(table(("setting", "default", "values", "meaning"), _rows(schema, section)))
        if key in NAMED:
            parts.append(_names(key))
    return "\n\n".join(parts)


def _rows(schema: Schema, section: Schema, prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Yield a row for each setting, the settings of a nested section after it with dotted names."""
    for name, given in section.get("properties", {}).items():
        setting = _resolve(schema, given)
        nested = [s for s in _alternatives(schema, given) if "properties" in s]
        default = given.get("default")
        shown = "required" if name in section.get("required", ()) else "" if nested else f"`{_yaml(default)}`"
        meaning = given.get("description") or setting.get("description", "")
        yield f"`{prefix}{name}`", shown, _values(schema, given), cell(meaning)
        for inner in nested:
            yield from _rows(schema, inner, prefix=f"{prefix}{name}.")


def _values(schema: Schema, given: Schema) -> str:
    """Return in a few words what a setting takes."""
    words = []
    for each in _alternatives(schema, given):
        if "enum" in each:
            names = each["enum"]
            words.append(", ".join(f"`{_yaml(v)}`" for v in names) if len(names) <= 12 else "a name, see below")
        elif "const" in each:
            words.append(f"`{_yaml(each['const'])}`")
        elif each.get("type") in ("integer", "number"):
            words.append(_number(each))
        elif "properties" in each:
            words.append("settings")
        elif "type" in each:
            words.append(TYPES.get(each["type"], str(each["type"])))
    return " or ".join(dict.fromkeys(word for word in words if word != "null"))


def _number(schema: Schema) -> str:
    bounds = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    limits = [f"{sign} {schema[key]:,}" for key, sign in bounds.items() if key in schema]
    return " ".join([schema["type"], ", ".join(limits)]).strip()


def _alternatives(schema: Schema, given: Schema) -> list[Schema]:
    """Return what a setting may be, references resolved."""
    if "$ref" in given:
        return [schema["$defs"][given["$ref"].rpartition("/")[2]]]
    if "anyOf" in given:
        return [each for option in given["anyOf"] for each in _alternatives(schema, option)]
    return [given]


def _resolve(schema: Schema, given: Schema) -> Schema:
    """Return the section behind a property: its own mapping, not the null beside it."""
    return next((s for s in _alternatives(schema, given) if s.get("type") != "null"), given)


def _names(section: str) -> str:
    """Return gradwatch's own names of a section with their settings, and how to list the rest."""
    vocabulary = NAMED[section]
    rows = []
    for entry in vocabulary.entries():
        if entry.is_own:
            signature = entry.read()
            settings = ", ".join(
                f"`{p.name}`" if p.required else f"`{p.name}: {p.shown_default()}`" for p in signature.parameters
            )
            rows.append((f"`{entry.name}`", settings, cell(signature.summary)))
    more = f"`gradwatch list {vocabulary.plural}` prints every name with its settings and defaults"
    libraries = f", including every {vocabulary.library_noun}" if vocabulary.library_noun else ""
    own = table(("name", "settings", "what it is"), rows) + "\n\n" if rows else ""
    return f"{own}{more}{libraries}."


def _yaml(value: object) -> str:
    """Return a value as it stands in YAML."""
    if isinstance(value, str):
        return value
    return json.dumps(value)
