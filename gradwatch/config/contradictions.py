"""Find settings that cannot work: they contradict each other, or need a package that is not installed."""

from __future__ import annotations

from gradwatch.config.parallel import parallel_problems
from gradwatch.config.sections.named import DataSection
from gradwatch.config.sections.root import Config
from gradwatch.config.streams import STREAMS, stream_problems
from gradwatch.errors import Problem
from gradwatch.render.packages import installation

OTHER_SOURCES = ("val_inputs", "val_split")
"""Settings of datasets that name a validation part, which needs no fraction of the training samples."""


def contradictions(config: Config) -> list[Problem]:
    """Return a problem for each setting that cannot work with the others, as far as that is known without the data."""
    found: list[Problem] = []
    if _holds_nothing_out(config.data):
        text = "needs a validation part, but data.val_fraction: 0 holds nothing out"
        for key, is_asked in needs_validation(config).items():
            if is_asked:
                help = "raise data.val_fraction, or leave this setting out"
                found.append(Problem(tuple(key.split(".")), text, help=help))
    stop = config.train.early_stop
    if stop and stop.metric == "val_accuracy" and config.data.options.get("kind") == "values":
        text = "got 'val_accuracy', expected val_loss or loss: data.kind: values has no accuracy"
        found.append(Problem(("train", "early_stop", "metric"), text))
    schedule = config.schedule
    cycles = schedule.name in ("OneCycleLR", "CyclicLR") and schedule.options.get("cycle_momentum", True)
    if cycles and config.optim.name == "adamw8bit":
        text = f"{schedule.name} moves the betas at each step, and adamw8bit is compiled again for each of their values"
        found.append(Problem(("schedule", "name"), text, help="set schedule.cycle_momentum: false"))
    if config.data.name in STREAMS:
        found += stream_problems(config, has_validation=config.data.options.get("val_files") is not None)
    return found + parallel_problems(config) + _missing_packages(config)


def needs_validation(config: Config) -> dict[str, bool]:
    """Return whether a config asks for validation, by the key of the setting that does."""
    return {
        # all metrics, since training stops only after an evaluation
        "train.early_stop": config.train.early_stop is not None,
        "train.checkpoint.best": config.train.checkpoint.best is True,
        "schedule.name": config.schedule.name == "ReduceLROnPlateau",
    }


def _holds_nothing_out(data: DataSection) -> bool:
    options = data.options
    is_zero = data.name is not None and options.get("val_fraction") == 0
    return is_zero and all(options.get(key) is None for key in OTHER_SOURCES)


def _missing_packages(config: Config) -> list[Problem]:
    sinks = [name for name, options in config.sinks.items() if options.get("enabled", True)]
    needed = {("sinks", name): name for name in sinks}
    if config.optim.name == "adamw8bit":
        needed["optim", "name"] = "torchao"
    return [
        Problem(key, f"the package {package} is not installed", help=command, is_about_key=key[0] == "sinks")
        for key, package in needed.items()
        if (command := installation(package))
    ]
