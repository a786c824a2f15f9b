"""A change of a run's config: what it says, what it sets, and the config that comes of it."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from gradwatch import plugins
from gradwatch.config.load import load_config
from gradwatch.config.schema import Config
from gradwatch.errors import GradwatchError, RunError
from gradwatch.records import Remedy

CONFIG = "config.yaml"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of a config.

    Args:
        text: What it does, for people.
        patch: Dotted keys with their new values.
    """

    text: str
    patch: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, remedy: Remedy) -> Change:
        """Return a remedy as a change."""
        return cls(text=remedy.text, patch=remedy.patch)


def config_of(run: Path, patch: Mapping[str, Any] | None = None) -> Config:
    """Return the config that a run was trained with, changed.

    Raises:
        GradwatchError: The run has none, or does not take the change.
    """
    path = run / CONFIG
    if not path.is_file():
        raise RunError(
            f"{run}: holds no config.yaml, so that its training cannot be run again: it was made by gradwatch.watch"
        )
    return load_config(path, [f"{key}={json.dumps(value)}" for key, value in (patch or {}).items()])


def is_taken(run: Path, change: Change) -> bool:
    """Say whether a run's config takes a change, and is another one with it."""
    if not all(_is_option(config_of(run), key) for key in change.patch):
        return False
    try:
        return config_of(run, change.patch) != config_of(run)
    except GradwatchError:
        return False


def taken_back(config: Config) -> Iterator[Change]:
    """Yield what sets one setting of a config back to its default: what was set may be what makes it ill.

    Options of a model of one's own first, then what is a matter of numbers.
    """
    section = config.model
    if section.target:
        parameters = inspect.signature(plugins.target(section.target, key="model.target")).parameters
        for name, value in section.options.items():
            default = parameters[name].default if name in parameters else inspect.Parameter.empty
            if default is not inspect.Parameter.empty and default != value and _is_plain(default):
                yield Change(text=f"set model.{name} back to its default, {default}", patch={f"model.{name}": default})
    if config.loss.target:
        yield Change(text="use torch's own loss in the place of one's own formula", patch={"loss": None})
    if config.schedule.name:
        yield Change(text="keep the learning rate as it is, without a schedule", patch={"schedule": None})
    if config.train.precision != "fp32":
        yield Change(text="compute in float32", patch={"train.precision": "fp32"})


def _is_option(config: Config, key: str) -> bool:
    """Say whether a key is one that a model of one's own can take; what others take, the config itself knows."""
    section, _, name = key.partition(".")
    if section != "model" or not config.model.target:
        return True
    parameters = inspect.signature(plugins.target(config.model.target, key="model.target")).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str)
