"""Convert between nested settings and settings by dotted key, and write config patches as YAML and commands."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

TESTED = {True: "tested: cures", False: "tested: does not cure"}
"""Words for a tested remedy, by whether it cures."""


def flat(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by dotted key."""
    settings: dict[str, Any] = {}
    for key, value in section.items():
        has_keys = isinstance(value, Mapping) and value  # an empty section is a value: it has no keys to flatten
        settings |= flat(value, f"{prefix}{key}.") if has_keys else {f"{prefix}{key}": value}
    return settings


def nested(patch: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by dotted key as nested settings."""
    settings: dict[str, Any] = {}
    for key, value in patch.items():
        *parents, last = key.split(".")
        node = settings
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return settings


def patch_yaml(patch: Mapping[str, Any]) -> str:
    """Return a config patch as YAML, with dotted keys expanded to nested keys."""
    # sort_keys=False: the keys keep the order in which the patch gives them
    return yaml.safe_dump(nested(patch), sort_keys=False, width=100).rstrip()


def patch_command(run: Path, patch: Mapping[str, Any]) -> str:
    """Return the command that trains the config of a run with a patch."""
    # JSON is valid YAML, and --set parses values as YAML
    values = (value if isinstance(value, str) else json.dumps(value) for value in patch.values())
    sets = (f"--set {shlex.quote(f'{key}={value}')}" for key, value in zip(patch, values, strict=True))
    return f"gradwatch train {shlex.quote(str(run / 'config.yaml'))} {' '.join(sets)}"
