"""Configs may use British spelling; gradwatch and its schema have the American one."""

import pytest

from gradwatch.config.load import load_config
from gradwatch.config.names.spelling import american, american_keys
from gradwatch.errors import ConfigError

CONFIG = """\
model: {name: mlp, normalisation: batch}
data: {name: csv, file: x.csv, standardise: false}
optim: {name: adamw, maximise: true, groups: [{match: a, maximise: false}]}
train: {steps: 1}
detect: {poor-initialisation: {enabled: false}}
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "mlp.yaml"
    path.write_text(CONFIG)
    return path


@pytest.mark.parametrize(
    ("british", "name"),
    [
        ("normalisation", "normalization"),
        ("standardise", "standardize"),
        ("initialise_weights", "initialize_weights"),
        ("normalised", "normalized"),
        *((same, same) for same in ("noise", "gaussian_noise", "surprise", "raise_rate", "precision", "rise", "Rise")),
    ],
)
def test_a_british_word_has_an_american_spelling(british, name):
    assert american(british) == name


def test_british_settings_are_those_of_the_american_spelling(config):
    read = load_config(config)
    config.write_text(CONFIG.replace("isation", "ization").replace("ise:", "ize:"))

    assert read == load_config(config)
    assert read.model.options == {"normalization": "batch"}
    assert read.data.options["standardize"] is False
    assert read.optim.groups[0].options == {"maximize": False}
    assert "standardize: false" in read.to_yaml()


@pytest.mark.parametrize("key", ["model.normalization", "model.normalisation"])
def test_an_override_in_either_spelling_changes_the_setting(config, key):
    assert load_config(config, [f"{key}=layer"]).model.options == {"normalization": "layer"}


def test_a_wrong_value_is_reported_with_the_spelling_and_the_line_of_the_file(config):
    config.write_text(CONFIG.replace("batch", "bach"))

    with pytest.raises(ConfigError) as caught:
        load_config(config)

    (problem,) = caught.value.problems
    assert problem.key == ("model", "normalisation")
    assert (problem.help, problem.excerpt.line, problem.excerpt.column) == ("did you mean 'batch'?", 1, 35)


def test_a_setting_in_both_spellings_is_a_mistake(config):
    config.write_text(CONFIG.replace("normalisation: batch", "normalization: batch, normalisation: layer"))

    with pytest.raises(ConfigError, match=r"normalisation: normalization is set twice, in two spellings; remove"):
        load_config(config)


def test_a_case_or_underscore_of_its_own_does_not_make_a_setting_known(config):
    config.write_text(CONFIG.replace("normalisation: batch", "Normalisation: batch"))

    with pytest.raises(ConfigError, match=r"model.Normalisation: unknown setting of mlp.*did you mean 'normalization'"):
        load_config(config)


def test_keys_at_all_depths_become_american():
    assert american_keys({"model": {"normalisation": "batch"}, "surprise": 1}) == {
        "model": {"normalization": "batch"},
        "surprise": 1,
    }
