"""From a config to live objects: the only module that knows the names in a config and the classes behind them."""

from __future__ import annotations

import fnmatch
import functools
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

from gradwatch import data, plugins
from gradwatch.config.sections.named import DataSection, ModelSection, OptimSection, ScheduleSection
from gradwatch.config.sections.root import Config
from gradwatch.data import Splits
from gradwatch.data import _torchvision as torchvision_data
from gradwatch.data import _transforms as transforms
from gradwatch.errors import GradwatchError, raised
from gradwatch.models import _torchvision as torchvision_models
from gradwatch.records import DataSpec
from gradwatch.render import SINKS, LogFormat, Sink

DEFAULT_LOSS = {"classes": "CrossEntropyLoss", "tokens": "CrossEntropyLoss", "values": "MSELoss"}
TENSOR_OPTIONS = {"weight", "pos_weight"}
"""Keyword arguments of torch's losses that are tensors, and lists in YAML."""
SPAN = {"CosineAnnealingLR": "T_max", "OneCycleLR": "total_steps"}
"""Schedules that must know how long the run is, and the argument that tells them; filled in where left out."""


def device(name: str) -> torch.device:
    """Return the device of that name; `auto` is CUDA where there is one, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(name)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].split(". ")[0]
        raise GradwatchError(f"train.device: '{name}' cannot be used here: {reason}; use auto or cpu") from error
    return found


def splits(section: DataSection) -> Splits:
    """Return the training and validation data of a config, with its transforms around them."""
    made = _built("data", "gradwatch.data", torchvision_data.build, section)
    if section.target:
        made = data.from_target(made)
    made = transforms.apply(made, transform=section.transform, augment=section.augment)
    data.check(made, section.target or section.name or "")
    return made


def model(config: Config, spec: DataSpec) -> nn.Module:
    """Return the model of a config, on the CPU and in training mode."""
    section = config.model
    made = _built("model", "gradwatch.models", torchvision_models.build, section, spec)
    if not isinstance(made, nn.Module):
        raise GradwatchError(f"model.target: '{section.target}' returned a {type(made).__name__}, expected a nn.Module")
    if not any(p.requires_grad for p in made.parameters()):
        raise GradwatchError(
            f"model: '{section.name or section.target}' has no parameter to train: "
            + ("each has requires_grad=False" if any(True for _ in made.parameters()) else "it has none at all")
        )
    return made


def optimizer(section: OptimSection, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of a config over the trainable parameters of a model.

    A parameter belongs to the first group with a pattern that its name matches; what matches none is the first group.
    """
    groups: list[list[nn.Parameter]] = [[] for _ in range(len(section.groups) + 1)]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups[_group_of(name, section) + 1].append(parameter)
    for i, group in enumerate(section.groups):
        if not groups[i + 1]:
            names = [name for name, _ in model.named_parameters()]
            raise GradwatchError(
                f"optim.groups.{i}.match: {list(group.patterns)} match no parameter that is left; "
                f"the model has {', '.join(names[:6])}{', ...' if len(names) > 6 else ''}"
            )
    overrides: list[Mapping[str, Any]] = [{}, *(group.options for group in section.groups)]
    filled = [{"params": p, **o} for p, o in zip(groups, overrides, strict=True) if p]
    made: torch.optim.Optimizer = _call(getattr(torch.optim, section.name), "optim", section.options, filled)
    return made


def schedule(
    section: ScheduleSection, optimizer: torch.optim.Optimizer, *, length: int
) -> lr_scheduler.LRScheduler | None:
    """Return the learning-rate schedule of a config, or None.

    Args:
        section: The config's section; may name no schedule.
        optimizer: What it drives.
        length: Steps or epochs of the run, whichever `section.per` counts.
    """
    warmup = section.warmup_steps
    main = _main_schedule(section, optimizer, max(1, length - warmup)) if section.name else None
    if not warmup:
        return main
    ramp = lr_scheduler.LinearLR(optimizer, start_factor=1 / (warmup + 1), total_iters=warmup)
    if main is None:
        return ramp
    if isinstance(main, lr_scheduler.ReduceLROnPlateau):
        raise GradwatchError("schedule.warmup_steps: ReduceLROnPlateau cannot follow a warm-up; set warmup_steps: 0")
    return lr_scheduler.SequentialLR(optimizer, [ramp, main], milestones=[warmup])


def loss(config: Config, spec: DataSpec) -> Callable[..., Any]:
    """Return the loss of a config: a torch loss, by default the usual one for the data, or the target's.

    A target that is a class is made with the section's settings; a function is the loss, and takes them at each call.
    """
    section = config.loss
    if section.target:
        made = plugins.target(section.target, key="loss.target")
        if inspect.isclass(made):
            made = _made(section.target, "loss.target", section.options)
        elif misfit := _misfit(made, None, None, **section.options):
            given = f", with the settings {', '.join(section.options)}" if section.options else ""
            raise GradwatchError(
                f"loss.target: '{section.target}' is called with the model's outputs and the targets{given}: {misfit}"
            )
        elif section.options:
            made = functools.partial(made, **section.options)
        return made
    name = section.name or DEFAULT_LOSS[spec.kind]
    options = dict(section.options)
    for key in TENSOR_OPTIONS & options.keys():
        if options[key] is not None:
            options[key] = torch.tensor(options[key], dtype=torch.float32)
    module: nn.Module = _call(getattr(nn, name), "loss", options)
    return module


def scaler(config: Config, device: torch.device) -> torch.amp.GradScaler | None:
    """Return the loss scaler of a config: for fp16, unless it is switched off."""
    section = config.train.scaler
    if config.train.precision != "fp16" or not section.enabled:
        return None
    if config.optim.name == "LBFGS":
        raise GradwatchError(
            "train.precision: LBFGS takes the loss several times a step, which a GradScaler forbids; use bf16"
        )
    return torch.amp.GradScaler(
        device.type,
        init_scale=section.init_scale,
        growth_factor=section.growth_factor,
        backoff_factor=section.backoff_factor,
        growth_interval=section.growth_interval,
    )


def sinks(config: Config, directory: Path, *, log_format: LogFormat, resumed_at: int | None) -> tuple[Sink, ...]:
    """Return what shows the run: the sinks of this package and of the entry points `gradwatch.sinks`.

    Args:
        config: The run's config.
        directory: The run directory.
        log_format: `auto`, `rich`, `plain` or `json`.
        resumed_at: First step of a resumed run; what a sink wrote of later steps is overwritten.
    """
    text = config.to_yaml()
    given: dict[str, dict[str, Any]] = {
        "html": {"directory": directory, "config_text": text},
        "terminal": {"run_dir": directory, "log_format": log_format},
        "tensorboard": {
            "directory": directory,
            "config_text": text,
            "hparams": hparams(config),
            "purge_step": resumed_at,
        },
    }
    made: list[Sink] = []
    for name, place in SINKS.items():
        options = dict(config.sinks.get(name, {}))
        if options.pop("enabled", True):
            made.append(pkgutil.resolve_name(place)(**given[name], **options))
    made.extend(sink(directory=directory) for sink in plugins.entry_points("gradwatch.sinks"))
    return tuple(made)


def hparams(config: Config) -> dict[str, bool | int | float | str]:
    """Return the settings by which runs are compared, flat, by their dotted paths."""
    chosen = {
        "run.seed": config.run.seed,
        "model": config.model.name or config.model.target,
        **{f"model.{key}": value for key, value in config.model.options.items()},
        "data": config.data.name or config.data.target,
        "data.batch_size": config.data.batch_size,
        "optim": config.optim.name,
        **{f"optim.{key}": value for key, value in config.optim.options.items()},
        "schedule": config.schedule.name or "none",
        "train.precision": config.train.precision,
        "train.accumulate": config.train.accumulate,
    }
    return {key: value if isinstance(value, (bool, int, float, str)) else str(value) for key, value in chosen.items()}


def _built(
    key: str, package: str, of_library: Callable[..., Any], section: ModelSection | DataSection, *args: Any
) -> Any:
    """Call the target of a section, the plugin of its name in a package, or else our builder of torchvision's."""
    if section.target:
        return _made(section.target, f"{key}.target", section.options)
    if section.name in plugins.names(package):
        return _call(plugins.load(package, section.name).build, key, section.options, *args)
    return _call(of_library, key, {"name": section.name} | section.options, *args)


def _group_of(name: str, section: OptimSection) -> int:
    for i, group in enumerate(section.groups):
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in group.patterns):
            return i
    return -1


def _main_schedule(section: ScheduleSection, optimizer: torch.optim.Optimizer, length: int) -> lr_scheduler.LRScheduler:
    assert section.name, "called with a named schedule"
    options = dict(section.options)
    if section.name in SPAN:
        options.setdefault(SPAN[section.name], length)
    made: lr_scheduler.LRScheduler = _call(getattr(lr_scheduler, section.name), "schedule", options, optimizer)
    planned = getattr(made, "total_steps", length)  # OneCycleLR raises where it is asked for more
    if planned < length:
        raise GradwatchError(
            f"schedule.total_steps: {section.name} ends after {planned} of the {length} times that it is asked for a "
            "learning rate; leave it out to have it fit"
        )
    return made


def _made(target: str, key: str, options: Mapping[str, Any]) -> Any:
    """Call a user's own factory; an exception becomes a message with its place in the user's code."""
    function = plugins.target(target, key=key)
    if misfit := _misfit(function, **options):
        raise GradwatchError(f"{key}: '{target}' does not accept these settings: {misfit}")
    try:
        return function(**options)
    except GradwatchError:
        raise
    except Exception as error:  # whatever a user's code may raise
        raise GradwatchError(f"{key}: '{target}' raised {raised(error)}") from error


def _misfit(function: Callable[..., Any], *args: Any, **options: Any) -> str:
    """Return why a function cannot be called with these arguments, or an empty string."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions that are not written in Python have none
        return ""
    try:
        signature.bind(*args, **options)
    except TypeError as error:
        return str(error)
    return ""


def _call(function: Callable[..., Any], key: str, options: Mapping[str, Any], *args: Any) -> Any:
    """Call a factory; what it does not accept is the user's mistake, at that key."""
    try:
        return function(*args, **options)
    except GradwatchError:
        raise
    except (TypeError, ValueError) as error:
        name = getattr(function, "__qualname__", str(function))
        raise GradwatchError(f"{key}: {name} does not accept these settings: {error}") from error
