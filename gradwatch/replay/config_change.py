"""Apply a remedy to the config of a run, and list the remedies that revert its settings to their defaults."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gradwatch import plugins
from gradwatch.config.load import load_config
from gradwatch.config.sections.base import NamedSection, TargetSection
from gradwatch.config.sections.named import ModelSection
from gradwatch.config.sections.root import Config
from gradwatch.config.settings import default_options
from gradwatch.errors import GradwatchError, RunError
from gradwatch.paths import RUN_CONFIG
from gradwatch.records import Remedy


def config_of(run: Path, patch: Mapping[str, Any] | None = None) -> Config:
    """Return the config of a run, with a patch applied.

    Raises:
        GradwatchError: The run directory has no config, or the patch is not valid for it.
    """
    path = run / RUN_CONFIG
    if not path.is_file():
        raise RunError(
            f"{run}: has no config.yaml (it was made by gradwatch.watch), so its training cannot be repeated"
        )
    # JSON is valid YAML, and overrides are parsed as YAML
    return load_config(path, [f"{key}={json.dumps(value)}" for key, value in (patch or {}).items()])


def is_taken(run: Path, change: Remedy) -> bool:
    """Return whether a change is valid for the config of a run and alters it."""
    # checked first: a config with a custom model accepts any option
    if not all(_is_option(config_of(run), key) for key in change.patch):
        return False
    try:
        return config_of(run, change.patch) != config_of(run)
    except GradwatchError:  # the change is not valid for this config
        return False


def reverted_settings(config: Config) -> Iterator[Remedy]:
    """Yield changes that each revert one setting of a config to its default, since that setting may be the cause.

    Options of the model, the loss and the optimizer come first, then the other sections. The size of the model and the
    learning rate are not reverted.
    """
    for key, section in (("model", config.model), ("loss", config.loss), ("optim", config.optim)):
        for name, default in _defaults(section).items():
            if name in section.options and section.options[name] != default:
                text = f"set {key}.{name} back to its default, {default}"
                yield Remedy(text=text, patch={f"{key}.{name}": default})
    if config.loss.target:
        yield Remedy(text="replace your own loss with torch's loss", patch={"loss": None})
    elif config.loss.name:
        yield Remedy(text="use the default loss for the data", patch={"loss": None})
    for name in ("transform", "augment"):
        if getattr(config.data, name):
            yield Remedy(text=f"remove data.{name}", patch={f"data.{name}": []})
    if config.optim.groups:
        yield Remedy(text="optimize all parameters in one group", patch={"optim.groups": []})
    if config.schedule.name:
        yield Remedy(text="keep the learning rate constant: remove the schedule", patch={"schedule": None})
    if config.train.clip:
        yield Remedy(text="do not clip the gradient", patch={"train.clip": None})
    if config.train.precision != "fp32":
        yield Remedy(text="train in float32", patch={"train.precision": "fp32"})


def _defaults(section: NamedSection) -> dict[str, Any]:
    """Return the plain defaults of a section's options, without model sizes and the learning rate."""
    defaults = default_options(section)
    if isinstance(section, TargetSection) and section.target:
        return defaults
    # integers of a model are sizes; compared by exact type, since a bool is an int too
    sizes = (int,) if isinstance(section, ModelSection) else ()
    return {name: value for name, value in defaults.items() if type(value) not in sizes and name != "lr"}


def _is_option(config: Config, key: str) -> bool:
    """Return whether a custom model accepts the option of a key; True for all other keys, which the config checks."""
    section, _, name = key.partition(".")
    if section != "model" or not config.model.target:
        return True
    parameters = inspect.signature(plugins.target(config.model.target, key="model.target")).parameters
    # a model with **kwargs accepts any option
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
