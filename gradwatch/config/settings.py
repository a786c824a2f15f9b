"""Resolve the settings of a config, with the defaults of what it names, so that remedies can be read against them."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

from gradwatch import plugins
from gradwatch.config.load import load_config
from gradwatch.config.sections.base import NamedSection, TargetSection
from gradwatch.config.sections.root import Config
from gradwatch.errors import GradwatchError
from gradwatch.history.store import History
from gradwatch.paths import RUN_CONFIG
from gradwatch.render.common.config_patch import flat

SECTIONS = ("model", "data", "loss", "optim", "schedule", "train")
"""Sections that decide how a model is trained; the others say how it is watched and shown."""


def effective_settings(config: Config) -> dict[str, Any]:
    """Return the settings of a training by dotted key.

    Options of the model, data, loss, optimizer and schedule have their defaults, so that a missing key is an option
    that is not accepted.
    """
    settings: dict[str, Any] = {}
    for key in SECTIONS:
        section = getattr(config, key)
        defaults = default_options(section) if isinstance(section, NamedSection) else {}
        settings |= {f"{key}.{name}": value for name, value in defaults.items()}
    settings |= flat(config.model_dump(mode="json", include=set(SECTIONS)))
    if config.data.shuffle is None:
        settings["data.shuffle"] = True
    return settings


def default_options(section: NamedSection) -> dict[str, Any]:
    """Return the options of what a section names that have a plain default: None, a bool, a number or text.

    Raises:
        GradwatchError: The section names a target that cannot be imported.
    """
    # a custom class is not in the vocabulary, so its signature is read
    if isinstance(section, TargetSection) and section.target:
        parameters = inspect.signature(plugins.target(section.target, key="target")).parameters.values()
        return {p.name: p.default for p in parameters if _is_plain(p.default)}
    entry = section.vocabulary.find(section.name) if section.name else None
    return {p.name: p.default for p in entry.read().parameters if _is_plain(p.default)} if entry else {}


def with_settings(history: History, run: Path) -> History:
    """Return the history of a run with the settings of its config, which older runs keep in config.yaml only."""
    path = run / RUN_CONFIG
    if history.info.settings is None and path.is_file():
        try:
            settings = effective_settings(load_config(path))
        except GradwatchError:  # the target is gone: remedies are given in words
            settings = {}
        history.info = replace(history.info, settings=settings)
    return history


def changed_settings(run: Path) -> str:
    """Return the settings of a run's config that differ from the defaults, as YAML; empty without a valid config."""
    path = run / RUN_CONFIG
    try:
        return load_config(path).to_yaml(defaults=False) if path.is_file() else ""
    except GradwatchError:  # a target that is gone
        return ""


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str)
