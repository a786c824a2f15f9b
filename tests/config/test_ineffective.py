"""Settings without effect are named, with the reason and what to do."""

import pytest

from gradwatch.config.ineffective import ineffective_settings, long_warmup
from gradwatch.config.load import load_config


def found(write, *overrides):
    return ineffective_settings(load_config(write(), overrides))


@pytest.mark.parametrize(
    ("overrides", "beginning", "remedy"),
    [
        (
            ["train.scaler.init_scale=2", "train.precision=bf16"],
            "train.scaler.init_scale: has no effect: only fp16 scales the loss, and train.precision is bf16",
            "set train.precision: fp16",
        ),
        (
            ["train.scaler={enabled: false, growth_interval: 5}", "train.precision=fp16"],
            "train.scaler.growth_interval: has no effect while train.scaler.enabled is false",
            "enable the scaler",
        ),
        (
            ["train.on_nonfinite=continue", "train.precision=fp16"],
            "train.on_nonfinite: 'continue' has no effect on gradients that overflow",
            "train.scaler.enabled: false",
        ),
        (
            ["data.pin_memory=true", "train.device=cpu"],
            "data.pin_memory: has no effect: it speeds up copies to a CUDA device, and train.device is cpu",
            "remove it",
        ),
        (
            ["train.activation_offloading=true", "train.device=cpu"],
            "train.activation_offloading: has no effect: it moves activations from a device to host memory, and "
            "train.device is cpu",
            "remove it",
        ),
        (
            ["watch.enabled=false", "watch.updates_every=5"],
            "watch.updates_every: has no effect while watch.enabled is false",
            "watch.enabled: true",
        ),
        (
            ["watch.enabled=false", "detect.dead-layer.decades=3"],
            "detect.dead-layer: has no effect while watch.enabled is false",
            "watch.enabled: true",
        ),
        (
            ["detect.dead-layer={enabled: false, decades: 3}"],
            "detect.dead-layer.decades: has no effect while detect.dead-layer.enabled is false",
            "remove one of them",
        ),
        (
            ["watch.record={enabled: false, every: 3}"],
            "watch.record.every: has no effect while watch.record.enabled is false",
            "remove one of them",
        ),
        (
            ["train.rewind.limit=5"],
            "train.rewind.limit: has no effect while train.on_critical is continue",
            "train.on_critical: rewind",
        ),
        (
            ["train.rewind.lr_factor=0.1", "train.on_critical=rewind"],
            "train.rewind.lr_factor: has no effect while train.rewind.remedy is skip",
            "remedy: lower_lr",
        ),
        (
            ["sinks.terminal={enabled: false, every: 3}"],
            "sinks.terminal.every: has no effect while sinks.terminal.enabled is false",
            "remove one of them",
        ),
        (
            ["sinks.tensorboard.enabled=false", "watch.histograms_every=5"],
            "watch.histograms_every: has no effect: only TensorBoard shows histograms",
            "enable that sink",
        ),
        (
            ["schedule={name: cosine_annealing, warmup_steps: 100}"],
            "schedule.name: CosineAnnealingLR has no effect: its warm-up of 100 steps fills all 100 of train.steps",
            "set schedule.warmup_steps below that",
        ),
        (
            ["schedule.warmup_steps=199"],
            "schedule.warmup_steps: 199 is more than train.steps (100): the run ends within its warm-up, at 0.5 of ",
            "lower it",
        ),
        (
            ["schedule={name: cosine_annealing, warmup_steps: 5, per: epoch}", "train.epochs=5"],
            "schedule.name: CosineAnnealingLR has no effect: its warm-up of 5 epochs fills all 5 of train.epochs",
            "set schedule.warmup_steps below that",
        ),
        (
            ["run.worst_samples=4", "train.parallel=ddp"],
            "run.worst_samples: has no effect: the maps of a training on several ranks are not made",
            "remove it",
        ),
        (["schedule.per=epoch"], "schedule.per: has no effect without a schedule", "set schedule.name"),
        (
            ["train.eval_every=500"],
            "train.eval_every: 500 has no effect: it is more than train.steps (100)",
            "lower it",
        ),
        (
            ["train.early_stop.patience=3", "train.eval_every=40"],
            "train.early_stop: has no effect: 3 evaluations without improvement cannot come before the end",
            "lower patience or train.eval_every",
        ),
        (
            ["optim.lr=1e9", "schedule={name: one_cycle, max_lr: 3e-3}"],
            "optim.lr: 1e+09 has no effect: OneCycleLR sets the learning rate from schedule.max_lr (0.003)",
            "change schedule.max_lr instead",
        ),
        (
            ["schedule={name: cyclic, base_lr: 1e-4, max_lr: 1e-3}"],
            "optim.lr: 0.001 has no effect: CyclicLR sets the learning rate from schedule.base_lr (0.0001)",
            "change schedule.base_lr instead",
        ),
    ],
)
def test_a_setting_without_effect_warns_with_reason_and_remedy(write, overrides, beginning, remedy):
    (sentence,) = found(write, *overrides)

    assert sentence.startswith(beginning)
    assert remedy in sentence


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["train.scaler.init_scale=2", "train.precision=fp16"],
        ["train.on_nonfinite=continue"],
        ["data.pin_memory=true"],
        ["data.pin_memory=true", "train.device=cuda:1"],
        ["watch.enabled=false"],
        ["watch.updates_every=5", "detect.dead-layer.decades=3"],
        ["detect.dead-layer.enabled=false"],
        ["sinks.tensorboard.enabled=false"],
        ["schedule={name: cosine_annealing, warmup_steps: 99}"],
        ["schedule.warmup_steps=100"],
        ["optim.lr=3e-3", "schedule={name: one_cycle, max_lr: 3e-3}"],
        ["optim.lr=3e-3", "schedule={name: one_cycle, max_lr: [1e-3]}"],
        ["schedule={warmup_steps: 2, per: epoch}"],
        ["train.eval_every=100"],
        ["train.early_stop.patience=3", "train.eval_every=25"],
        ["train.early_stop.patience=3", "train.epochs=2"],
    ],
)
def test_settings_that_do_something_are_quiet(write, overrides):
    assert found(write, *overrides) == ()


def test_a_config_that_writes_out_all_defaults_is_quiet(write):
    text = load_config(write()).to_yaml()

    assert ineffective_settings(load_config(write(text))) == ()


@pytest.mark.parametrize(
    ("schedule", "length", "beginning"),
    [
        (
            "schedule.warmup_steps=100000",
            320,
            "schedule.warmup_steps: 100000 is more than the run's steps (320): the run ends within its warm-up",
        ),
        (
            "schedule={name: cosine_annealing, warmup_steps: 320}",
            320,
            "schedule.name: CosineAnnealingLR has no effect: its warm-up of 320 steps fills all 320 of the run's steps",
        ),
        (
            "schedule={name: one_cycle, max_lr: 3e-3, warmup_steps: 500}",
            320,
            "schedule.name: OneCycleLR has no effect: its warm-up of 500 steps fills all 320 of the run's steps",
        ),
        ("schedule.warmup_steps=320", 320, ""),
        ("schedule.warmup_steps=0", 320, ""),
    ],
)
def test_a_warm_up_longer_than_the_run_is_reported_once_the_data_tell_the_steps(write, schedule, length, beginning):
    config = load_config(write(), ["train={epochs: 10}", schedule])

    told = long_warmup(config, length=length)

    assert not any("warm-up" in sentence for sentence in ineffective_settings(config)), "the config does not show it"
    assert [sentence.startswith(beginning) for sentence in told] == ([True] if beginning else [])
