"""Read and write YAML: safely, every value with its line, plain text resolved as in YAML 1.2 (`3e-4` is a number)."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from gradwatch.errors import Key, Problem

_TAG = "tag:yaml.org,2002:"
_DIGITS = "-+0123456789"
_RESOLVERS = (  # https://yaml.org/spec/1.2.2/#1032-tag-resolution; YAML 1.1 has 3e-4 and 1e5 as text, `no` as false
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list(_DIGITS)),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list(_DIGITS + "."),
    ),
)


class _Reader(yaml.SafeLoader):
    """Composes nodes with the tags of YAML 1.2."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012  # PyYAML's own name


class _Writer(yaml.SafeDumper):
    """Writes text in quotes if YAML 1.1 or 1.2 would read it as something else."""

    def ignore_aliases(self, data: Any) -> bool:
        """Return True: a list that occurs twice is written twice, without an alias."""
        return True


def _list(writer: yaml.SafeDumper, data: list[Any]) -> Node:
    on_one_line = not any(isinstance(item, dict | list) for item in data)
    return writer.represent_sequence(_TAG + "seq", data, flow_style=on_one_line)


def _text(writer: yaml.SafeDumper, text: str) -> Node:
    # PyYAML escapes these line breaks and the byte order mark only in double quotes; elsewhere it reads others back
    style = '"' if not {"\x85", "\u2028", "\u2029", "\ufeff"}.isdisjoint(text) else None
    return writer.represent_scalar(_TAG + "str", text, style=style)


_Writer.add_representer(list, _list)
_Writer.add_representer(str, _text)
for _name, _pattern, _first in _RESOLVERS:
    for _class in (_Reader, _Writer):
        _class.add_implicit_resolver(_TAG + _name, re.compile(f"^(?:{_pattern})$"), _first)


@lru_cache(maxsize=16)  # a search for a cure reads the config of its run a hundred times
def compose(text: str) -> Node | None:
    """Parse one document to a tree of YAML nodes, or None if it is empty.

    Callers share the tree and must not change it.

    Raises:
        yaml.YAMLError: The text is not YAML.
    """
    return yaml.compose(text, Loader=_Reader)


def write(data: Any) -> str:
    """Convert data to YAML that reads back equal."""
    return yaml.dump(data, Dumper=_Writer, sort_keys=False, allow_unicode=True, width=100)


def line_of(node: Node) -> int:
    """Return the first line of a node, counted from 1."""
    return int(node.start_mark.line) + 1


def to_data(node: Node | None) -> tuple[Any, list[Problem]]:
    """Convert a tree of nodes to plain data, and return the problems in it: keys set twice, tags, loops."""
    found: list[Problem] = []
    return _to_data(node, (), frozenset(), found), found


def _to_data(node: Node | None, key: Key, above: frozenset[Node], found: list[Problem]) -> Any:
    if node in above:  # an alias to a node around it would recurse forever
        found.append(Problem(key, "contains itself by an alias, expected plain values"))
        return None
    match node:
        case MappingNode():
            return _mapping(node, key, above | {node}, found)
        case SequenceNode():
            return [_to_data(item, (*key, i), above | {node}, found) for i, item in enumerate(node.value)]
        case ScalarNode():
            try:
                return _SCALARS[node.tag.removeprefix(_TAG)](node.value)
            except (KeyError, ValueError):
                found.append(Problem(key, f"got {node.value!r} with the tag {node.tag!r}, expected a plain value"))
    return None


def _mapping(node: MappingNode, key: Key, above: frozenset[Node], found: list[Problem]) -> dict[str, Any]:
    lines: dict[str, int] = {}
    data: dict[str, Any] = {}
    for name_node, value_node in node.value:
        if not isinstance(name_node, ScalarNode):
            found.append(Problem(key, "has a list or mapping as a key, expected text"))
            continue
        name = str(name_node.value)
        if name in data:
            found.append(
                Problem(
                    (*key, name), f"is set twice, first in line {lines[name]}", help="remove one", is_about_key=True
                )
            )
        lines.setdefault(name, line_of(name_node))  # the first line, for the message about the second
        data[name] = _to_data(value_node, (*key, name), above, found)
    return data


def _float(text: str) -> float:
    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))


def _int(text: str) -> int:
    # int(text, 0) rejects leading zeros such as 007, which YAML 1.2 reads as 7
    return int(text, 0) if text[:2] in ("0o", "0x") else int(text)


_SCALARS: dict[str, Callable[[str], Any]] = {
    "null": lambda text: None,
    "bool": lambda text: text.lower() == "true",
    "int": _int,
    "float": _float,
    "str": str,
}
