"""The settings of a run are known with their defaults, also of runs that did not record them."""

from dataclasses import replace

import pytest

from gradwatch.config.load import load_config
from gradwatch.config.settings import effective_settings, with_settings
from gradwatch.history.synthetic.builder import Synthetic

CONFIG = """
model: {name: mlp, depth: 4}
data: {name: digits}
optim: {name: adamw}
train: {steps: 10}
"""


@pytest.fixture
def path(tmp_path):
    (tmp_path / "config.yaml").write_text(CONFIG)
    return tmp_path / "config.yaml"


def test_options_have_the_defaults_of_what_is_named(path):
    settings = effective_settings(load_config(path))

    assert settings["model.depth"] == 4
    assert settings["model.activation"] == "relu"
    assert settings["optim.lr"] == 1e-3, "of torch.optim.AdamW"
    assert settings["train.clip"] is None
    assert "data.standardize" not in settings, "digits have no such option"
    assert not any(key.startswith(("watch", "sinks")) for key in settings)


def test_a_run_without_recorded_settings_has_those_of_its_config(path):
    history = Synthetic(steps=5).history()

    assert with_settings(history, path.parent).info.settings["model.depth"] == 4


def test_a_run_of_an_own_loop_has_no_settings(tmp_path):
    assert with_settings(Synthetic(steps=5).history(), tmp_path).info.settings is None


def test_recorded_settings_are_kept(path):
    history = Synthetic(steps=5).history()
    history.info = replace(history.info, settings={"model.depth": 7})

    assert with_settings(history, path.parent).info.settings == {"model.depth": 7}


def test_a_target_that_is_gone_leaves_no_settings(tmp_path):
    (tmp_path / "config.yaml").write_text(CONFIG.replace("name: mlp", 'target: "gone.away:Model"'))

    assert with_settings(Synthetic(steps=5).history(), tmp_path).info.settings == {}
