"""Find settings that have no effect because of other settings, to warn before the training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pydantic import BaseModel

from gradwatch.config.sections.root import Config

RATES_OF_SCHEDULES = {"OneCycleLR": "max_lr", "CyclicLR": "base_lr"}
"""Settings of the schedules that overwrite the learning rates of the optimizer when they start."""

Warnings = Iterator[tuple[Iterable[str], str]]
"""Keys of settings without effect, and the rest of the message: the reason and what to do."""


def ineffective_settings(config: Config) -> tuple[str, ...]:
    """Return a sentence for each changed setting without effect: the setting, the reason and the remedy."""
    found = (
        *_in_numerics(config),
        *_in_watching(config),
        *_in_switches(config),
        *_in_report(config),
        *_in_schedule(config),
        *_in_length(config),
    )
    return tuple(f"{key}: {text}" for keys, text in found for key in keys)


def _in_numerics(config: Config) -> Warnings:
    """Yield the settings that have no effect with this precision or device."""
    train, device = config.train, config.train.device
    if train.precision != "fp16":
        yield (
            _changed(train.scaler, "train.scaler"),
            f"has no effect: only fp16 scales the loss, and train.precision is {train.precision}; remove it, or set "
            "train.precision: fp16",
        )
    elif not train.scaler.enabled:
        yield (
            _changed(train.scaler, "train.scaler", but="enabled"),
            "has no effect while train.scaler.enabled is false; remove it, or enable the scaler",
        )
    elif train.on_nonfinite == "continue":  # GradScaler.step skips an update by itself if a gradient is not finite
        yield (
            ["train.on_nonfinite"],
            "'continue' has no effect on gradients that overflow: the loss scaler of fp16 skips these updates itself; "
            "remove it, or set train.scaler.enabled: false",
        )
    if train.parallel != "hsdp":
        yield (
            _changed_of(train, "train", "shard_ranks"),
            f"has no effect: only hsdp needs it, and train.parallel is {train.parallel}; remove it",
        )
    if train.parallel == "none":
        yield (
            _changed_of(train, "train", "sync_batchnorm"),
            "has no effect: one process normalizes whole batches; remove it, or set train.parallel",
        )
    if train.activation_offloading and device.startswith(("cpu", "mps")):
        yield (
            ["train.activation_offloading"],
            f"has no effect: it moves activations from a device to host memory, and train.device is {device}, which "
            "computes there; remove it",
        )
    if config.data.pin_memory and not device.startswith(("auto", "cuda")):  # auto may still become CUDA
        yield (
            ["data.pin_memory"],
            f"has no effect: it speeds up copies to a CUDA device, and train.device is {device}; remove it",
        )


def _in_watching(config: Config) -> Warnings:
    """Yield the settings of `watch` and of the reaction to critical findings that have no effect."""
    train, watch = config.train, config.watch
    if not watch.enabled:
        keys = [*_changed(watch, "watch", but="enabled"), *(f"detect.{kind}" for kind in config.detect)]
        yield keys, "has no effect while watch.enabled is false; remove it, or set watch.enabled: true"
    elif not config.sinks.get("tensorboard", {}).get("enabled", True):
        yield (
            [key for key in _changed(watch, "watch") if key == "watch.histograms_every"],
            "has no effect: only TensorBoard shows histograms, and sinks.tensorboard.enabled is false; remove it, or "
            "enable that sink",
        )
    if train.on_critical != "rewind":  # a rewind needs snapshots even if watch.record is disabled
        if not watch.record.enabled:
            keys = _changed(watch.record, "watch.record", but="enabled")
            yield keys, "has no effect while watch.record.enabled is false; remove one of them"
        yield (
            _changed(train.rewind, "train.rewind"),
            f"has no effect while train.on_critical is {train.on_critical}; remove it, or set train.on_critical: "
            "rewind",
        )
    elif train.rewind.remedy == "skip":
        yield (
            [key for key in _changed(train.rewind, "train.rewind") if key == "train.rewind.lr_factor"],
            "has no effect while train.rewind.remedy is skip; remove it, or set train.rewind.remedy: lower_lr",
        )


def _in_switches(config: Config) -> Warnings:
    """Yield the settings of disabled detectors and sinks."""
    for section, switches in (("detect", config.detect), ("sinks", config.sinks)):
        for name, options in switches.items():
            if not options.get("enabled", True):
                path = f"{section}.{name}"
                keys = [f"{path}.{key}" for key in options if key != "enabled"]
                yield keys, f"has no effect while {path}.enabled is false; remove one of them"


def _in_report(config: Config) -> Warnings:
    """Yield the number of samples with maps, if there is no report to show them or they cannot be made."""
    keys = _changed_of(config.run, "run", "worst_samples")
    if not config.sinks.get("html", {}).get("enabled", True):
        yield keys, "has no effect: maps stand in report.html, and sinks.html.enabled is false; remove one of them"
    elif config.train.parallel != "none":
        yield (
            keys,
            f"has no effect: the maps of a training on several ranks are not made, and train.parallel is "
            f"{config.train.parallel}; remove it",
        )


def _in_schedule(config: Config) -> Warnings:
    """Yield the learning rate, if the schedule sets another one."""
    lr, schedule = config.optim.options.get("lr"), config.schedule
    key = RATES_OF_SCHEDULES.get(schedule.name or "")
    rate = schedule.options.get(key) if key else None
    if lr is not None and isinstance(rate, int | float) and rate != lr:
        yield (
            ["optim.lr"],
            f"{lr:g} has no effect: {schedule.name} sets the learning rate from schedule.{key} ({rate:g}); change "
            f"schedule.{key} instead",
        )


def long_warmup(config: Config, *, length: int) -> tuple[str, ...]:
    """Return the warning of a warm-up that does not end before the run, or nothing.

    Args:
        config: Config of the run.
        length: Length of the run as `schedule.per` counts it. With `train.epochs`, the data determine the steps.
    """
    return tuple(f"{key}: {text}" for keys, text in _in_warmup(config, length) for key in keys)


def _in_warmup(config: Config, length: int) -> Warnings:
    schedule, unit = config.schedule, f"{config.schedule.per}s"
    if schedule.warmup_steps < length or not schedule.warmup_steps:
        return
    span = f"train.{unit}" if getattr(config.train, unit) else f"the run's {unit}"
    if schedule.name:
        yield (
            ["schedule.name"],
            f"{schedule.name} has no effect: its warm-up of {schedule.warmup_steps} {unit} fills all {length} of "
            f"{span}; set schedule.warmup_steps below that",
        )
    elif schedule.warmup_steps > length:
        yield (
            ["schedule.warmup_steps"],
            f"{schedule.warmup_steps} is more than {span} ({length}): the run ends within its warm-up, at "
            f"{length / (schedule.warmup_steps + 1):.2g} of optim.lr; lower it",
        )


def _in_length(config: Config) -> Warnings:
    """Yield the settings that have no effect in such a short run."""
    train, schedule = config.train, config.schedule
    if length := getattr(train, f"{schedule.per}s"):  # None if the run is limited by the other unit
        yield from _in_warmup(config, length)
    if schedule.per == "epoch" and not schedule.name and not schedule.warmup_steps:
        yield ["schedule.per"], "has no effect without a schedule; remove it, or set schedule.name"
    if not (train.eval_every and train.steps):
        return  # with epochs, the number of steps depends on the data, which are not loaded yet
    if train.eval_every > train.steps:
        yield (
            ["train.eval_every"],
            f"{train.eval_every} has no effect: it is more than train.steps ({train.steps}), so the model is only "
            "evaluated at the end; lower it",
        )
    # `<=`, since the first evaluation is always an improvement and does not count for patience
    if train.early_stop and train.steps // train.eval_every <= train.early_stop.patience:
        yield (
            ["train.early_stop"],
            f"has no effect: {train.early_stop.patience} evaluations without improvement cannot come before the end, "
            f"with one every {train.eval_every} of {train.steps} steps; lower patience or train.eval_every",
        )


def _changed_of(section: BaseModel, path: str, name: str) -> list[str]:
    """Return the key of one setting of a section if it differs from its default."""
    return [key for key in _changed(section, path) if key == f"{path}.{name}"]


def _changed(section: BaseModel, path: str, *, but: str = "") -> list[str]:
    """Return the keys of a section's settings that differ from their defaults, except the key `but`."""
    fields = type(section).model_fields.items()
    return [f"{path}.{name}" for name, field in fields if getattr(section, name) != field.default and name != but]
