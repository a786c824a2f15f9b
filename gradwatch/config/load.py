"""Load a config from a file with overrides, check it, and report all problems at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gradwatch.config import yaml_document
from gradwatch.config.contradictions import contradictions
from gradwatch.config.names.checks import check_switches
from gradwatch.config.names.registry import DETECTORS
from gradwatch.config.problems import problems_of
from gradwatch.config.sections.root import Config
from gradwatch.config.yaml_document import Document
from gradwatch.errors import ConfigError, Key, Problem

_PAIRS: tuple[tuple[Key, Key], ...] = (
    (("train", "steps"), ("train", "epochs")),
    (("train", "clip", "norm"), ("train", "clip", "value")),
    (("model", "name"), ("model", "target")),
    (("data", "name"), ("data", "target")),
    (("loss", "name"), ("loss", "target")),
)
EXCLUDES = dict(_PAIRS) | {second: first for first, second in _PAIRS}
"""Setting that an override of another setting removes: `--set train.steps=3` removes `train.epochs`."""


def load_config(
    path: Path, overrides: Sequence[str] = (), *, changes: Sequence[Path] = (), is_new: bool = False
) -> Config:
    """Load the config in a file.

    Args:
        path: YAML file.
        overrides: Texts such as `optim.lr=3e-4`, with priority over `changes`.
        changes: YAML files that override some values; later files have priority.
        is_new: Whether a new run begins with it, so that its settings must also fit together. Configs of older runs
            may have contradictions, which were not always found.

    Returns:
        The checked config.

    Raises:
        ConfigError: With every problem, each with key, value, expectation and place.
    """
    written = yaml_document.read(path)
    for file in changes:  # before the overrides, which have priority
        written.merge(yaml_document.read(file), excludes=EXCLUDES)
    written.override(overrides, excludes=EXCLUDES)
    config: Config | None = None
    found: list[Problem] = []
    try:
        config = Config.model_validate(_named(written.data, path.stem))
    except ValidationError as error:
        found = problems_of(error, data=written.data, model=Config)
    if config and is_new:
        found = contradictions(config)
    # problems of the YAML itself, such as a key set twice, may exist even if the settings are valid
    problems = written.place_problems(found)
    if problems or config is None:
        raise ConfigError(problems)
    return config


def load_detect(path: Path | None, overrides: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """Load only the section `detect`: settings by kind.

    Args:
        path: YAML file, or None; its other sections are ignored.
        overrides: Texts such as `detect.dead-layer.every=5`.

    Raises:
        ConfigError: With every problem in that section.
    """
    written = yaml_document.read(path) if path else Document("{}", file="--set")
    written.override(overrides, excludes={})
    checked, below = check_switches(DETECTORS, written.data.get("detect") or {})
    found = [p.below("detect") for p in below]
    elsewhere = (key for key in written.overridden if key[0] != "detect")
    found += [Problem(key, "cannot be set here, expected detect.<kind>.<setting>") for key in elsewhere]
    if problems := written.place_problems(found):
        raise ConfigError(problems)
    return checked


def _named(data: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the data of a config with a default name for the run."""
    run = data.get("run") or {}
    # a `run` that is not a mapping stays, so that validation reports it
    return data | {"run": {"name": name} | run} if isinstance(run, dict) else data
