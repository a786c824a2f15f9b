"""Build live objects from a config: the only module that maps the names in a config to classes."""

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
from gradwatch.render import ON_REQUEST, SINKS, LogFormat, Sink
from gradwatch.state.rng import preserved_random_state

DEFAULT_LOSS = {"classes": "CrossEntropyLoss", "tokens": "CrossEntropyLoss", "values": "MSELoss"}
TENSOR_OPTIONS = {"weight", "pos_weight"}
"""Keyword arguments of torch's losses that are tensors in torch and lists in YAML."""
SPAN = {"CosineAnnealingLR": "T_max", "OneCycleLR": "total_steps"}
"""Schedules that need the length of the run, and the argument for it; filled in if the config omits it."""


def device(name: str) -> torch.device:
    """Return the device of a name; `auto` is CUDA if available, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(name)
        torch.empty(0, device=found)  # torch.device accepts devices that this machine lacks
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch was compiled without CUDA
        reason = str(error).splitlines()[0].split(". ")[0]
        raise GradwatchError(f"train.device: '{name}' cannot be used here: {reason}; use auto or cpu") from error
    return found


def splits(section: DataSection) -> Splits:
    """Build the training and validation data of a config, with its transforms."""
    made = _built("data", "gradwatch.data", torchvision_data.build, section)
    if section.target:
        made = data.from_target(made)
    made = transforms.apply(made, transform=section.transform, augment=section.augment)
    return data.check(made, section.target or section.name or "")


def model(config: Config, spec: DataSpec) -> nn.Module:
    """Build the model of a config, on the CPU and in training mode."""
    section = config.model
    made = _built("model", "gradwatch.models", torchvision_models.build, section, spec)
    if not isinstance(made, nn.Module):
        raise GradwatchError(f"model.target: '{section.target}' returned a {type(made).__name__}, expected a nn.Module")
    if not any(p.requires_grad for p in made.parameters()):  # torch's optimizers accept no empty list
        raise GradwatchError(
            f"model: '{section.name or section.target}' has no parameter to train: "
            + ("each has requires_grad=False" if any(True for _ in made.parameters()) else "it has none at all")
        )
    return made


def optimizer(section: OptimSection, model: nn.Module) -> torch.optim.Optimizer:
    """Build the optimizer of a config for the trainable parameters of a model.

    A parameter belongs to the first group with a pattern that matches its name. The parameters without a match form
    param group 0.
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
    # if every parameter matches a group, the default group is empty, and `if p` drops it
    overrides: list[Mapping[str, Any]] = [{}, *(group.options for group in section.groups)]
    filled = [{"params": p, **o} for p, o in zip(groups, overrides, strict=True) if p]
    is_own = section.name in plugins.names("gradwatch.optimizers")
    factory = plugins.load("gradwatch.optimizers", section.name).build if is_own else getattr(torch.optim, section.name)
    made: torch.optim.Optimizer = _call(factory, "optim", section.options, filled)
    return made


def schedule(
    section: ScheduleSection, optimizer: torch.optim.Optimizer, *, length: int
) -> lr_scheduler.LRScheduler | None:
    """Build the learning-rate schedule of a config, or return None if it names none.

    Args:
        section: The config's section; may name no schedule.
        optimizer: Optimizer with the learning rates to schedule.
        length: Steps or epochs of the run, as `section.per` counts.
    """
    warmup = section.warmup_steps
    # max: a warm-up that fills the whole run leaves 0 steps, which OneCycleLR rejects
    main = _main_schedule(section, optimizer, max(1, length - warmup)) if section.name else None
    if not warmup:
        return main
    # step i of the warm-up gets (i + 1) / (warmup + 1) of the learning rate; LinearLR rejects a start factor of 0
    ramp = lr_scheduler.LinearLR(optimizer, start_factor=1 / (warmup + 1), total_iters=warmup)
    if main is None:
        return ramp
    if isinstance(main, lr_scheduler.ReduceLROnPlateau):  # SequentialLR calls step() without a metric
        raise GradwatchError("schedule.warmup_steps: ReduceLROnPlateau cannot follow a warm-up; set warmup_steps: 0")
    return lr_scheduler.SequentialLR(optimizer, [ramp, main], milestones=[warmup])


def loss(config: Config, spec: DataSpec) -> Callable[..., Any]:
    """Build the loss of a config: a torch loss, by default the usual one for the data, or the target's.

    A target class is called once with the section's settings. A target function is the loss itself, and takes the
    settings at each call.
    """
    section = config.loss
    if section.target:
        made = plugins.target(section.target, key="loss.target")
        if inspect.isclass(made):
            made = _made(section.target, "loss.target", section.options)
        elif misfit := _misfit(made, None, None, **section.options):  # found here, not in the first step
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
    """Build the loss scaler of a config, or return None: only fp16 has one, unless it is disabled."""
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
    """Build the enabled sinks of this package and the sinks of the entry points `gradwatch.sinks`.

    Args:
        config: The run's config.
        directory: The run directory.
        log_format: `auto`, `rich`, `plain` or `json`.
        resumed_at: First step of a resumed run, or None; sinks overwrite their output from this step.
    """
    text, tracked = config.to_yaml(), {"directory": directory, "hparams": hparams(config)}
    given: dict[str, dict[str, Any]] = {
        "html": {"directory": directory, "config_text": text, "changed_text": config.to_yaml(defaults=False)},
        "terminal": {"run_dir": directory, "log_format": log_format},
        "tensorboard": {
            "directory": directory,
            "config_text": text,
            "hparams": hparams(config),
            "purge_step": resumed_at,
        },
        "wandb": tracked,
        "mlflow": tracked,
        "trackio": tracked,
        "callable": {},
    }
    made: list[Sink] = []
    for name, place in SINKS.items():
        options = dict(config.sinks.get(name, {"enabled": name not in ON_REQUEST}))
        if options.pop("enabled", True):
            # resolved late, so that a disabled sink imports nothing
            made.append(_sink(pkgutil.resolve_name(place), name, given[name] | options))
    made.extend(sink(directory=directory) for sink in plugins.entry_points("gradwatch.sinks"))
    return tuple(made)


def _sink(factory: Callable[..., Sink], name: str, options: Mapping[str, Any]) -> Sink:
    try:
        with preserved_random_state():  # the library of a tracker may draw when it is imported
            return factory(**options)
    except (GradwatchError, OSError):
        raise
    except Exception as error:  # a tracker may refuse a run for any reason, such as a missing login
        raise GradwatchError(f"sinks.{name}: {raised(error)}") from error


def hparams(config: Config) -> dict[str, bool | int | float | str]:
    """Return the settings that TensorBoard compares runs by, flat, with their dotted paths as keys."""
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
    # TensorBoard's hparams accept scalars and text only
    return {key: value if isinstance(value, (bool, int, float, str)) else str(value) for key, value in chosen.items()}


def _built(
    key: str, package: str, of_library: Callable[..., Any], section: ModelSection | DataSection, *args: Any
) -> Any:
    """Call the target of a section, else the package's plugin of that name, else the builder for torchvision."""
    if section.target:
        return _made(section.target, f"{key}.target", section.options)
    if section.name in plugins.names(package):
        return _call(plugins.load(package, section.name).build, key, section.options, *args)
    return _call(of_library, key, {"name": section.name} | section.options, *args)


def _group_of(name: str, section: OptimSection) -> int:
    for i, group in enumerate(section.groups):
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in group.patterns):
            return i
    return -1  # the default group, see `optimizer`


def _main_schedule(section: ScheduleSection, optimizer: torch.optim.Optimizer, length: int) -> lr_scheduler.LRScheduler:
    assert section.name, "called with a named schedule"
    options = dict(section.options)
    if section.name in SPAN:
        options.setdefault(SPAN[section.name], length)
    made: lr_scheduler.LRScheduler = _call(getattr(lr_scheduler, section.name), "schedule", options, optimizer)
    planned = getattr(made, "total_steps", length)  # OneCycleLR raises after its last step
    if planned < length:
        raise GradwatchError(
            f"schedule.total_steps: {section.name} ends after {planned} of the {length} times that it is asked for a "
            "learning rate; leave it out to have it fit"
        )
    return made


def _made(target: str, key: str, options: Mapping[str, Any]) -> Any:
    """Call a user's own factory, and turn an exception into a message with its location in the user's code."""
    function = plugins.target(target, key=key)
    # checked before the call: a TypeError from inside the factory is another mistake
    if misfit := _misfit(function, **options):
        raise GradwatchError(f"{key}: '{target}' does not accept these settings: {misfit}")
    try:
        return function(**options)
    except GradwatchError:
        raise  # already a message for the user
    except Exception as error:  # the user's code may raise any exception
        raise GradwatchError(f"{key}: '{target}' raised {raised(error)}") from error


def _misfit(function: Callable[..., Any], *args: Any, **options: Any) -> str:
    """Return why a function rejects these arguments, or an empty string."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C have no signature
        return ""
    try:
        signature.bind(*args, **options)
    except TypeError as error:
        return str(error)
    return ""


def _call(function: Callable[..., Any], key: str, options: Mapping[str, Any], *args: Any) -> Any:
    """Call a factory, and report rejected arguments as the user's mistake at a config key."""
    try:
        return function(*args, **options)
    except GradwatchError:
        raise
    except (TypeError, ValueError) as error:
        name = getattr(function, "__qualname__", str(function))
        raise GradwatchError(f"{key}: {name} does not accept these settings: {error}") from error
