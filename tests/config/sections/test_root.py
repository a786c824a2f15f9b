"""The config as data: defaults, what never changes, and the way to YAML and back."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from gradwatch.config.load import load_config
from gradwatch.config.names import registry
from gradwatch.config.sections.base import Section
from gradwatch.config.sections.root import Config
from gradwatch.config.sections.train import ClipSection, TrainSection


def test_what_is_left_out_has_its_default(write):
    config = load_config(write())

    assert (config.run.seed, config.run.out) == (0, Path("runs"))
    assert (config.data.batch_size, config.data.shuffle, config.data.augment) == (64, None, ())
    assert (config.loss.name, config.loss.target, config.schedule.name) == (None, None, None)
    assert (config.train.precision, config.train.clip, config.train.scaler.init_scale) == ("fp32", None, 65536.0)
    assert (config.watch.updates_every, config.detect, config.sinks) == (10, {}, {})


FULL = """\
run: {name: "3e-4", seed: 7, deterministic: true, out: elsewhere/runs}
model: {name: mlp, depth: 3, shape: [3, 4], note: "yes"}
data:
  target: my.data:build
  folder: "010"
  batch_size: 8
  eval_batch_size: 16
  transform: [{Normalize: {mean: [0.5], std: [0.25]}}]
  augment: [RandomHorizontalFlip, {RandomCrop: {size: 28, padding: 4}}, {target: "a.b:c", strength: 2}]
loss: {name: cross_entropy, weight: [1, 2.5], label_smoothing: 0.1}
optim:
  name: adamw
  lr: 1e-5
  betas: [0.9, 0.95]
  groups: [{match: ["*.bias", "*.norm.*"], weight_decay: 0}, {match: head.*, lr: 1}]
schedule: {name: one_cycle, max_lr: [0.1, .inf], per: step, warmup_steps: 5}
train:
  epochs: 3
  device: cuda:1
  precision: fp16
  accumulate: 2
  clip: {value: 0.5}
  activation_checkpointing: {modules: ["blocks.*"]}
  compile: {mode: reduce-overhead}
  eval_every: 10
  checkpoint: {every: 5, keep: 1, best: false}
  early_stop: {metric: val_accuracy, patience: 2}
  on_nonfinite: stop
  scaler: {growth_interval: 10}
watch: {activations_every: 0}
detect: {dead-layer: {enabled: false, decades: 3}}
sinks: {tensorboard: {enabled: false}, terminal: {every: 5}}
"""


def test_a_config_with_everything_set_loads_back_equal_from_its_own_yaml(write):
    config = load_config(write(FULL))

    again = load_config(write(config.to_yaml(), name="again.yaml"))

    assert again == config
    assert again.to_yaml() == config.to_yaml()
    assert (again.run.name, again.model.options["note"]) == ("3e-4", "yes"), "text that looks like something else"
    assert again.optim.options["betas"] == (0.9, 0.95), "a tuple where one is annotated"


def test_yaml_names_first_what_a_section_is_and_stands_flat(write):
    text = load_config(write()).to_yaml()

    assert "model:\n  name: mlp\n" in text
    assert "optim:\n  name: AdamW\n  lr: 0.001\n" in text
    assert "options" not in text


@pytest.fixture(scope="module")
def optimizers():
    """Read torch's optimizers once, which is too slow for the first of many examples."""
    return registry.OPTIMIZERS.entries()


@given(lr=st.floats(min_value=0, allow_nan=False), name=st.text(st.characters(codec="utf-8"), min_size=1))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_number_and_any_name_survive_yaml(write, optimizers, lr, name):
    assume(not {"/", "\\", "\0"} & set(name) and set(name) != {"."})
    data = {
        "run": {"name": name},
        "model": {"name": "mlp"},
        "data": {"name": "digits"},
        "optim": {"name": "sgd", "lr": lr},
        "train": {"steps": 1},
    }
    config = Config.model_validate(data)

    assert load_config(write(config.to_yaml())) == config


def test_nothing_in_a_config_can_be_set_afterwards(write):
    config = load_config(write())

    with pytest.raises(ValidationError, match="frozen"):
        config.train.precision = "bf16"


def test_every_setting_is_described():
    sections = [s for s in descendants(Section) if s.__module__.startswith("gradwatch.config")]

    assert {"TrainSection", "ScalerSection", "GroupSection", "OptimSection"} <= {s.__name__ for s in sections}
    for section in sections:
        assert section.__doc__, section
        for name, field in section.model_fields.items():
            assert name in ("name", "options") or field.description, f"{section.__name__}.{name} has no description"


def descendants(cls):
    return [d for child in cls.__subclasses__() for d in (child, *descendants(child))]


@pytest.mark.parametrize(
    ("written", "options"),
    [
        (False, None),
        (True, {}),
        (
            {"mode": "max-autotune", "dynamic": False},
            {"backend": "inductor", "mode": "max-autotune", "fullgraph": False, "dynamic": False},
        ),
    ],
)
def test_compile_options_are_the_keyword_arguments_of_torch_compile(written, options):
    assert TrainSection(steps=1, compile=written).compile_options == options


def test_patterns_of_a_group_are_a_tuple_also_where_there_is_one(write):
    groups = load_config(write(FULL)).optim.groups

    assert [g.patterns for g in groups] == [("*.bias", "*.norm.*"), ("head.*",)]


def test_a_setting_that_is_wrong_is_not_said_to_be_missing_too():
    with pytest.raises(ValidationError) as caught:
        ClipSection(norm="x")

    assert [e["loc"] for e in caught.value.errors()] == [("norm",)]
