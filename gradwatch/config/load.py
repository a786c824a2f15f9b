"""Load a config: from a file with overrides to checked settings, or every mistake at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gradwatch.config import document, known
from gradwatch.config.choices import check_switches
from gradwatch.config.document import Document
from gradwatch.config.effects import warnings
from gradwatch.config.problems import Key, Problem, explain
from gradwatch.config.schema import Config
from gradwatch.errors import ConfigError

__all__ = ["load_config", "load_detect", "warnings"]

_PAIRS: tuple[tuple[Key, Key], ...] = (
    (("train", "steps"), ("train", "epochs")),
    (("train", "clip", "norm"), ("train", "clip", "value")),
    (("model", "name"), ("model", "target")),
    (("data", "name"), ("data", "target")),
    (("loss", "name"), ("loss", "target")),
)
EXCLUDES = dict(_PAIRS) | {second: first for first, second in _PAIRS}
"""What an override removes from the file: `--set train.steps=3` is meant in place of its epochs."""


def load_config(path: Path, overrides: Sequence[str] = (), *, changes: Sequence[Path] = ()) -> Config:
    """Return the config of a file.

    Args:
        path: YAML file.
        overrides: Texts such as `optim.lr=3e-4`.
        changes: YAML files that set some of its values anew, the later the stronger; overrides are stronger still.

    Raises:
        ConfigError: With every mistake, each with key, value, expectation and place.
    """
    written = document.read(path)
    for file in changes:
        written.merge(document.read(file), excludes=EXCLUDES)
    written.override(overrides, excludes=EXCLUDES)
    config, found = None, []
    try:
        config = Config.model_validate(_named(written.data, path.stem))
    except ValidationError as error:
        found = explain(error, data=written.data, model=Config)
    mistakes = written.mistakes(found)
    if mistakes or config is None:
        raise ConfigError(mistakes)
    return config


def load_detect(path: Path | None, overrides: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """Return only the section `detect`: settings by kind.

    Args:
        path: YAML file whose other sections are not looked at, or None.
        overrides: Texts such as `detect.dead-layer.every=5`.

    Raises:
        ConfigError: With every mistake in that section.
    """
    written = document.read(path) if path else Document("{}", file="--set")
    written.override(overrides, excludes={})
    checked, below = check_switches(known.DETECTORS, written.data.get("detect") or {})
    found: list[Problem] = [(("detect", *key), text) for key, text in below]
    elsewhere = (key for key in written.overridden if key[0] != "detect")
    found += [(key, "cannot be set here, expected detect.<kind>.<setting>") for key in elsewhere]
    if mistakes := written.mistakes(found):
        raise ConfigError(mistakes)
    return checked


def _named(data: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the data of a config with a name for the run where it has none."""
    run = data.get("run") or {}
    return data | {"run": {"name": name} | run} if isinstance(run, dict) else data
