"""Make the JSON schema of a config from its sections and all signatures, for completion and checks in editors."""

from __future__ import annotations

import importlib.metadata
import json
import math
import textwrap
from typing import Any

from gradwatch.config.names import registry
from gradwatch.config.names.checks import make_options_model, with_enabled
from gradwatch.config.names.signatures import Signature
from gradwatch.config.names.vocabulary import Vocabulary
from gradwatch.config.names.yaml_types import UNKNOWN
from gradwatch.config.sections.base import NamedSection
from gradwatch.config.sections.named import DataSection, LossSection, ModelSection, OptimSection, ScheduleSection
from gradwatch.config.sections.root import Config

Schema = dict[str, Any]

NAMED: tuple[type[NamedSection], ...] = (ModelSection, DataSection, LossSection, OptimSection, ScheduleSection)


def render_schema() -> str:
    """Return the schema as JSON text, as `gradwatch schema` prints it and `schema.json` holds it."""
    return _pretty(make_schema(), indent="") + "\n"


def make_schema() -> Schema:
    """Return the schema, draft 2020-12. It has the usual spellings of each name; a config may use others."""
    made: Schema = _without_titles(Config.model_json_schema())
    definitions = made["$defs"]
    for section in NAMED:
        _depend_on_name(definitions[section.__name__], section)
    # YAML has the options among the other settings, see OptionsSection
    definitions["GroupSection"]["properties"].pop("options")
    definitions["GroupSection"].pop("additionalProperties")
    # the validator exactly_one_with is Python, which pydantic cannot turn into a schema
    definitions["TrainSection"]["oneOf"] = [_has("steps"), _has("epochs")]
    definitions["ClipSection"]["oneOf"] = [_has("norm"), _has("value")]
    definitions["BlocksSection"]["oneOf"] = [_has("every"), _has("modules")]
    definitions |= _transforms()
    for key in ("transform", "augment"):
        definitions["DataSection"]["properties"][key]["items"] = {"$ref": "#/$defs/Transform"}
    for key, vocabulary in (("detect", registry.DETECTORS), ("sinks", registry.SINKS)):
        made["properties"][key] |= _switches(vocabulary)
    # an empty section is null in YAML, see Config._fill_empty_sections
    for key in made["properties"].keys() - set(made["required"]):
        made["properties"][key] = {"anyOf": [made["properties"][key], {"type": "null"}]}
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$comment": f"Written by `gradwatch schema` with {library_versions()}.",
        "title": "gradwatch config",
    }
    return head | made


def library_versions() -> str:
    """Return the versions of the libraries that the schema takes names and keyword arguments from."""
    names = ("torch", "torchvision")
    # without a local version such as +cpu, which does not change the signatures
    return " and ".join(f"{name} {importlib.metadata.version(name).partition('+')[0]}" for name in names)


def _depend_on_name(definition: Schema, section: type[NamedSection]) -> None:
    """Make the allowed settings of a section depend on its name."""
    vocabulary = section.vocabulary
    properties = definition["properties"]
    del properties["options"], definition["additionalProperties"]
    groups = _by_options(vocabulary)
    names = [name for spellings, _ in groups for name in spellings]
    properties["name"] = {
        "enum": names,
        "description": f"Which {vocabulary.noun}; see `gradwatch list {vocabulary.plural}`.",
    }
    if "target" in properties:
        properties["target"] |= {"pattern": r"^[\w.]+:\w+$"}
    if not section.name_is_optional:
        definition["oneOf"] = [_has("name"), _has("target")] if "target" in properties else [_has("name")]
    definition["allOf"] = [
        {
            "if": {"properties": {"name": {"enum": spellings}}, "required": ["name"]},
            "then": _with_own(properties, options),
        }
        for spellings, options in groups
    ]


def _by_options(vocabulary: Vocabulary) -> list[tuple[list[str], Schema]]:
    """Return the spellings of all usable names with their options; names with the same options together."""
    groups: dict[str, tuple[list[str], Schema]] = {}
    for entry in vocabulary.entries():
        signature = entry.read()
        if not signature.unusable:
            options = _options(signature, described=entry.is_own)
            # as text, because a dict cannot be a key
            groups.setdefault(json.dumps(options), ([], options))[0].extend(vocabulary.spellings(entry))
    return list(groups.values())


def _with_own(properties: Schema, options: Schema) -> Schema:
    """Return a schema of a section's own settings and of the options of one name."""
    # true accepts any value: the section's definition describes them, but additionalProperties must know their names
    own: Schema = dict.fromkeys(properties, True)
    if "groups" in properties:
        # required options may be set once for all groups, so a group needs none
        group = {key: value for key, value in options.items() if key != "required"}
        own["groups"] = {"items": group | {"properties": {"match": True, **options["properties"]}}}
    return options | {"properties": own | options["properties"]}


def _options(signature: Signature, *, described: bool) -> Schema:
    """Return the schema of a signature's keyword arguments, with descriptions if `described`."""
    made = _without_titles(make_options_model(signature).model_json_schema())
    properties = made.get("properties", {})
    for parameter in signature.parameters:
        own = properties[parameter.name]
        if not described:
            own.pop("description", None)
        if parameter.default is UNKNOWN or parameter.default in (math.inf, -math.inf):
            own.pop("default", None)  # unknown, or an infinity, which JSON does not have
    required = {"required": made["required"]} if "required" in made else {}
    return {"type": "object", "properties": properties, **required, "additionalProperties": signature.is_open}


def _switches(vocabulary: Vocabulary) -> Schema:
    options = {e.name: _options(with_enabled(e.read()), described=e.is_own) for e in vocabulary.entries()}
    return {"type": "object", "properties": options, "additionalProperties": False}


def _transforms() -> Schema:
    """Return the definition `Transform`, and a definition of the keyword arguments of each transform."""
    definitions: Schema = {}
    alone: list[str] = []
    mapped: Schema = {}
    for entry in registry.TRANSFORMS.entries():
        signature = entry.read()
        if signature.unusable:
            continue
        definitions[entry.name] = _options(signature, described=False)
        mapped |= {name: {"$ref": f"#/$defs/{entry.name}"} for name in registry.TRANSFORMS.spellings(entry)}
        if "required" not in definitions[entry.name]:  # else the name alone is not enough
            alone += registry.TRANSFORMS.spellings(entry)
    one: Schema = {"type": "object", "properties": mapped, "additionalProperties": False}
    one |= {"minProperties": 1, "maxProperties": 1}
    return definitions | {"Transform": {"anyOf": [{"enum": alone}, one, {"type": "object", **_has("target")}]}}


def _has(key: str) -> Schema:
    # null counts as not set, so `required` alone is not enough
    return {"required": [key], "properties": {key: {"not": {"type": "null"}}}}


def _pretty(value: Any, *, indent: str) -> str:
    """Return JSON with each list and mapping on one line if it fits, so that diffs are easy to read."""
    line = json.dumps(value, allow_nan=False)
    if len(indent) + len(line) <= 116 or not isinstance(value, dict | list):
        return line
    inner = indent + "  "
    if isinstance(value, dict):
        items = [f"{inner}{json.dumps(key)}: {_pretty(item, indent=inner)}" for key, item in value.items()]
        return "{\n" + ",\n".join(items) + "\n" + indent + "}"
    if all(isinstance(item, str) and not item.count(" ") for item in value):  # names: as many per line as fit
        filled = textwrap.fill(line[1:-1], 116, initial_indent=inner, subsequent_indent=inner, break_on_hyphens=False)
        return f"[\n{filled}\n{indent}]"
    return "[\n" + ",\n".join(inner + _pretty(item, indent=inner) for item in value) + "\n" + indent + "]"


def _without_titles(made: Any) -> Any:
    """Return a schema without the titles that pydantic derives from names."""
    if isinstance(made, list):
        return [_without_titles(item) for item in made]
    if isinstance(made, dict):
        # a `title` that is not text is a setting of that name
        return {k: _without_titles(v) for k, v in made.items() if k != "title" or not isinstance(v, str)}
    return made
