"""Contradictions: settings that need validation data, in a config that holds nothing out."""

import pytest

from gradwatch.config.load import load_config
from gradwatch.errors import ConfigError

CONFIG = """\
model: {name: mlp}
data: {name: csv, file: t.csv, val_fraction: 0}
optim: {name: adamw, lr: 1e-3}
train: {epochs: 1}
"""


@pytest.fixture
def load(tmp_path):
    def load(*overrides, text=CONFIG, is_new=True):
        (tmp_path / "c.yaml").write_text(text)
        return load_config(tmp_path / "c.yaml", overrides, is_new=is_new)

    return load


ASKING = {
    "train.early_stop": "train.early_stop={metric: val_loss}",
    "train.checkpoint.best": "train.checkpoint.best=true",
    "schedule.name": "schedule.name=ReduceLROnPlateau",
}


@pytest.mark.parametrize(("key", "override"), ASKING.items())
def test_what_needs_validation_is_a_problem_with_its_place(load, key, override):
    with pytest.raises(ConfigError) as caught:
        load(override)

    (problem,) = caught.value.problems
    assert str(problem) == (
        f"{key}: needs a validation part, but data.val_fraction: 0 holds nothing out; raise data.val_fraction, or "
        f"leave this setting out (--set {override})"
    )
    assert problem.excerpt.width > 1, "it has a caret"


def test_problems_in_a_file_have_their_line(load):
    with pytest.raises(ConfigError, match=r"early_stop: needs .* \(.*c\.yaml, line 5\)"):
        load(text=CONFIG.replace("{epochs: 1}", "\n  early_stop: {metric: loss}\n  epochs: 1"))


@pytest.mark.parametrize(
    "overrides",
    [
        ["data.val_fraction=0.1"],
        ["data={name: npz, file: t.npz, val_inputs: v, val_targets: w, val_fraction: 0}"],
        ["data={name: MNIST, val_fraction: null}"],
        ["data={target: 'mine:data', val_fraction: 0}"],  # what it holds out is known only when it is built
    ],
)
def test_data_that_may_have_a_validation_part_are_fine(load, overrides):
    assert load(*overrides, *ASKING.values())


def test_without_a_metric_of_validation_nothing_is_needed(load):
    assert load().train.checkpoint.best is None
    assert load("train.checkpoint.best=false")


def test_values_have_no_accuracy(load):
    with pytest.raises(
        ConfigError, match=r"early_stop\.metric: got 'val_accuracy', expected val_loss or loss: data\.kind"
    ):
        load("data={name: synthetic, kind: values}", "train.early_stop={metric: val_accuracy}")


def test_configs_of_older_runs_still_load(load):
    assert load(*ASKING.values(), is_new=False)


def test_settings_that_ranks_cannot_have_are_problems(load):
    wrong = ["train.device=cuda:1", "train.on_critical=rewind", "train.activation_offloading=true", "optim.name=LBFGS"]

    with pytest.raises(ConfigError) as caught:
        load("data.val_fraction=0.1", "train.parallel=fsdp2", *wrong)

    keys = {".".join(problem.key) for problem in caught.value.problems}
    assert keys == {"train.device", "train.on_critical", "train.activation_offloading", "optim.name"}
    assert load("data.val_fraction=0.1", *wrong)
