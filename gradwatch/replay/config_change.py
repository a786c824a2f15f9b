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
from gradwatch.config.sections.base import NamedSection, TargetSection
from gradwatch.config.sections.named import ModelSection
from gradwatch.config.sections.root import Config
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


def reverted_settings(config: Config) -> Iterator[Change]:
    """Yield what sets one setting of a config back to its default: what was set may be what makes it ill.

    Options of the model, the loss and the optimizer first, then what stands around them. How large a model is, and how
    far its steps go, is nobody's default.
    """
    for key, section in (("model", config.model), ("loss", config.loss), ("optim", config.optim)):
        for name, default in _defaults(section).items():
            if name in section.options and section.options[name] != default:
                text = f"set {key}.{name} back to its default, {default}"
                yield Change(text=text, patch={f"{key}.{name}": default})
    if config.loss.target:
        yield Change(text="use torch's loss instead of your own formula", patch={"loss": None})
    elif config.loss.name:
        yield Change(text="use the usual loss for the data", patch={"loss": None})
    for name in ("transform", "augment"):
        if getattr(config.data, name):
            yield Change(text=f"take the data without data.{name}", patch={f"data.{name}": []})
    if config.optim.groups:
        yield Change(text="optimize all parameters alike, without groups", patch={"optim.groups": []})
    if config.schedule.name:
        yield Change(text="keep the learning rate as it is, without a schedule", patch={"schedule": None})
    if config.train.clip:
        yield Change(text="do not clip the gradient", patch={"train.clip": None})
    if config.train.precision != "fp32":
        yield Change(text="compute in float32", patch={"train.precision": "fp32"})


def _defaults(section: NamedSection) -> dict[str, Any]:
    """Return the defaults of what a section names, where they are plain values that say how and not how much."""
    if isinstance(section, TargetSection) and section.target:
        parameters = inspect.signature(plugins.target(section.target, key="target")).parameters.values()
        return {p.name: p.default for p in parameters if _is_plain(p.default)}
    entry = section.vocabulary.find(section.name) if section.name else None
    known = entry.read().parameters if entry else ()
    sizes = (int,) if isinstance(section, ModelSection) else ()
    return {
        p.name: p.default for p in known if _is_plain(p.default) and type(p.default) not in sizes and p.name != "lr"
    }


def _is_option(config: Config, key: str) -> bool:
    """Say whether a key is one that a model of one's own can take; what others take, the config itself knows."""
    section, _, name = key.partition(".")
    if section != "model" or not config.model.target:
        return True
    parameters = inspect.signature(plugins.target(config.model.target, key="model.target")).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str)
