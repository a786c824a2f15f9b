"""Convert between nested settings and settings by dotted key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml


def flat(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by dotted key."""
    settings: dict[str, Any] = {}
    for key, value in section.items():
        nested = isinstance(value, Mapping) and value  # an empty section is a value: it has no keys to flatten
        settings |= flat(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return settings


def patch_yaml(patch: Mapping[str, Any]) -> str:
    """Return a config patch as YAML, with dotted keys expanded to nested keys."""
    nested: dict[str, Any] = {}
    for key, value in patch.items():
        *parents, last = key.split(".")
        node = nested
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    # sort_keys=False: the keys keep the order in which the patch gives them
    return yaml.safe_dump(nested, sort_keys=False, width=100).rstrip()
