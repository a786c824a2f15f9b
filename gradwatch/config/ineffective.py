"""Find settings that other settings keep from having an effect, so that a warning comes before the training."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel

from gradwatch.config.sections.root import Config


def ineffective_settings(config: Config) -> tuple[str, ...]:
    """Return a sentence for each changed setting without effect: the setting, the reason and the remedy."""
    rules = (
        _scaler,
        _nonfinite,
        _pinning,
        _watching,
        _switched_off,
        _histograms,
        _warmup,
        _evaluation,
        _early_stop,
        _record,
        _critical,
        _watched_step,
    )
    return tuple(sentence for rule in rules for sentence in rule(config))


def _scaler(config: Config) -> Iterator[str]:
    train = config.train
    for name in _changed(train.scaler):
        key = f"train.scaler.{name}"
        if train.precision != "fp16":
            why = f"only fp16 scales the loss, and train.precision is {train.precision}"
            yield f"{key}: has no effect: {why}; remove it, or set train.precision: fp16"
        elif not train.scaler.enabled and name != "enabled":
            yield f"{key}: has no effect while train.scaler.enabled is false; remove it, or enable the scaler"


def _nonfinite(config: Config) -> Iterator[str]:
    train = config.train
    if train.on_nonfinite == "continue" and train.precision == "fp16" and train.scaler.enabled:
        yield (
            "train.on_nonfinite: 'continue' has no effect on gradients that overflow: the loss scaler of fp16 skips "
            "these updates itself; remove it, or set train.scaler.enabled: false"
        )


def _pinning(config: Config) -> Iterator[str]:
    device = config.train.device
    if config.data.pin_memory and device != "auto" and not device.startswith("cuda"):
        yield (
            f"data.pin_memory: has no effect: it speeds up copies to a CUDA device, and train.device is {device}; "
            "remove it"
        )


def _watching(config: Config) -> Iterator[str]:
    if config.watch.enabled:
        return
    keys = [f"watch.{name}" for name in _changed(config.watch) if name != "enabled"]
    keys += [f"detect.{kind}" for kind in config.detect]
    for key in keys:
        yield f"{key}: has no effect while watch.enabled is false; remove it, or set watch.enabled: true"


def _record(config: Config) -> Iterator[str]:
    if not config.watch.record.enabled:
        for name in _changed(config.watch.record):
            if name != "enabled" and config.train.on_critical != "rewind":
                yield f"watch.record.{name}: has no effect while watch.record.enabled is false; remove one of both"


def _critical(config: Config) -> Iterator[str]:
    train = config.train
    if train.on_critical != "rewind":
        for name in _changed(train.rewind):
            yield (
                f"train.rewind.{name}: has no effect while train.on_critical is {train.on_critical}; remove it, or set "
                "train.on_critical: rewind"
            )
    elif train.rewind.remedy == "skip" and "lr_factor" in _changed(train.rewind):
        yield (
            "train.rewind.lr_factor: has no effect while train.rewind.remedy is skip; remove it, or set "
            "train.rewind.remedy: lower_lr"
        )


def _switched_off(config: Config) -> Iterator[str]:
    for section, switches in (("detect", config.detect), ("sinks", config.sinks)):
        for name, options in switches.items():
            if options.get("enabled", True):
                continue
            for key in options.keys() - {"enabled"}:
                yield (
                    f"{section}.{name}.{key}: has no effect while {section}.{name}.enabled is false; remove one of both"
                )


def _histograms(config: Config) -> Iterator[str]:
    shown = config.sinks.get("tensorboard", {}).get("enabled", True)
    if config.watch.enabled and not shown and "histograms_every" in _changed(config.watch):
        yield (
            "watch.histograms_every: has no effect: only TensorBoard shows histograms, and sinks.tensorboard.enabled "
            "is false; remove it, or enable that sink"
        )


def _warmup(config: Config) -> Iterator[str]:
    schedule = config.schedule
    unit = f"{schedule.per}s"
    length = getattr(config.train, unit)
    if schedule.name and length and schedule.warmup_steps >= length:
        yield (
            f"schedule.name: {schedule.name} has no effect: its warm-up of {schedule.warmup_steps} {unit} fills all "
            f"{length} of train.{unit}; set schedule.warmup_steps below that"
        )
    elif length and schedule.warmup_steps > length:
        yield (
            f"schedule.warmup_steps: {schedule.warmup_steps} is more than train.{unit} ({length}): the run ends within "
            f"its warm-up, at {length / (schedule.warmup_steps + 1):.2g} of optim.lr; lower it"
        )
    if schedule.per == "epoch" and not schedule.name and not schedule.warmup_steps:
        yield "schedule.per: has no effect without a schedule; remove it, or set schedule.name"


def _evaluation(config: Config) -> Iterator[str]:
    train = config.train
    if train.eval_every and train.steps and train.eval_every > train.steps:
        yield (
            f"train.eval_every: {train.eval_every} has no effect: it is more than train.steps ({train.steps}), so that "
            "only the end is evaluated; lower it"
        )


def _early_stop(config: Config) -> Iterator[str]:
    train = config.train
    if not (train.early_stop and train.eval_every and train.steps):
        return
    evaluations = train.steps // train.eval_every
    if evaluations <= train.early_stop.patience:
        yield (
            f"train.early_stop: has no effect: {train.early_stop.patience} evaluations without improvement cannot come "
            f"before the end, with one every {train.eval_every} of {train.steps} steps; lower patience or "
            "train.eval_every"
        )


def _watched_step(config: Config) -> Iterator[str]:
    device = config.train.device
    if config.optim.watched and device.startswith(("mps", "xpu")):
        yield (
            f"optim.watched: has no effect on {device}, where torch.optim.{config.optim.name} makes the step; remove "
            "it, or set train.device: cpu"
        )


def _changed(section: BaseModel) -> list[str]:
    """Return the names of a section's settings that differ from their defaults."""
    return [name for name, field in type(section).model_fields.items() if getattr(section, name) != field.default]
