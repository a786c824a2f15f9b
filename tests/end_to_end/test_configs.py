"""Every config that is shipped loads, warns of nothing, and trains three steps; `test_clinic.py` trains the clinic."""

from pathlib import Path

import pytest
from real_formats import write_cifar, write_mnist

from gradwatch.config.ineffective import ineffective_settings
from gradwatch.config.load import load_config
from gradwatch.train.loop import train

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))


def named(path):
    return str(path.relative_to(ROOT / "configs"))


@pytest.fixture
def data_root(tmp_path, monkeypatch):
    """Write small data files in their real formats."""
    write_mnist(tmp_path)
    write_cifar(tmp_path, monkeypatch)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 150)
    return tmp_path


@pytest.mark.parametrize("path", [path for path in CONFIGS if path.parent.name != "clinic"], ids=named)
def test_a_shipped_config_trains_three_steps(path, data_root):
    overrides = [f"run.out={data_root / 'runs'}", "train.epochs=null", "train.steps=3"]
    if load_config(path).data.name in {"MNIST", "CIFAR10"}:
        overrides += [f"data.root={data_root}", "data.download=false", "data.batch_size=4", "data.workers=0"]
    if load_config(path).data.name == "text":
        overrides += [f"data.file={data_root / 'text.txt'}", "data.batch_size=2", "data.context=32"]
    config = load_config(path, overrides)

    outcome = train(config, log_format="plain")

    assert (outcome.ending, outcome.history.step) == ("finished", 2)


@pytest.mark.parametrize("path", CONFIGS, ids=named)
def test_a_shipped_config_has_no_setting_without_an_effect(path, monkeypatch):
    monkeypatch.chdir(ROOT)  # the clinic's targets import from here

    assert ineffective_settings(load_config(path)) == ()


@pytest.mark.parametrize("path", CONFIGS, ids=named)
def test_a_shipped_config_names_the_schema_and_says_what_it_is(path):
    first, second, *_ = path.read_text().splitlines()

    assert first.startswith("# yaml-language-server: $schema=")
    assert (path.parent / first.partition("$schema=")[2]).resolve() == ROOT / "gradwatch/config/schema.json"
    assert second.startswith("# ")
