"""Paths of users: `~` is the home folder wherever a path enters."""

import numpy as np
import pytest
import torch
from real_formats import write_folder, write_mnist

import gradwatch
from gradwatch.cli import main
from gradwatch.config.load import load_config
from gradwatch.data import _torchvision, csv, npz, text
from gradwatch.errors import ConfigError, GradwatchError
from gradwatch.paths import user_path

CONFIG = """\
run: {out: ~/experiments}
model: {name: mlp, depth: 1, width: 4}
data: {name: synthetic, samples: 60, batch_size: 20}
optim: {name: sgd, lr: 0.01}
train: {steps: 2}
sinks: {html: {enabled: false}, tensorboard: {enabled: false}}
"""


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Return a new home folder; the current folder is another one, which must stay empty."""
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    yield home
    assert not list(here.iterdir()), "nothing is written to a folder called `~`"


def test_config_output_and_resumed_run_may_be_below_the_home_folder(home):
    (home / "small.yaml").write_text(CONFIG)
    (home / "more.yaml").write_text("train: {steps: 4}")

    assert main(["train", "~/small.yaml", "--fail-on", "never"]) == 0
    (run,) = (home / "experiments").iterdir()
    resumed = main(["train", f"--resume=~/experiments/{run.name}", "--set-file", "~/more.yaml", "--fail-on", "never"])

    assert resumed == 0
    assert gradwatch.load_run(f"~/experiments/{run.name}").step == 3
    assert main(["runs", "~/experiments"]) == 0
    assert main(["diagnose", f"~/experiments/{run.name}", "--format", "html", "--output", "~/page.html"]) == 0
    assert (home / "page.html").is_file()
    assert main(["compare", f"~/experiments/{run.name}", f"~/experiments/{run.name}"]) == 0


def test_a_watched_loop_writes_below_the_home_folder(home):
    model = torch.nn.Linear(4, 1)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradwatch.watch(model, optimizer, run="~/mine", record=True, on_finding=None).close()

    assert (home / "mine" / "run.json").is_file()
    assert gradwatch.incidents("~/mine") == ()


def test_data_files_may_be_below_the_home_folder(home):
    (home / "t.csv").write_text("a,y\n" + "".join(f"{i},{i}.5\n" for i in range(10)))
    np.savez(home / "t.npz", x=np.eye(4), y=[0, 1, 0, 1])
    (home / "t.txt").write_text("abc" * 50)
    write_folder(home / "pics", each=10)
    write_mnist(home / "idx")

    assert len(csv.build(file="~/t.csv").train) == 8
    assert len(npz.build(file="~/t.npz").train) == 4
    assert text.build(file="~/t.txt", context=8).spec.outputs == 3
    assert len(_torchvision.build(name="ImageFolder", root="~/pics").train) == 18
    assert len(_torchvision.build(name="MNIST", root="~/idx").train) == 12


def test_an_unknown_user_is_a_mistake_with_a_way_out(home, tmp_path):
    with pytest.raises(GradwatchError, match=r"~nobody7/x: there is no home folder for '~nobody7'; .* \./~nobody7"):
        user_path("~nobody7/x")

    (tmp_path / "c.yaml").write_text(CONFIG)
    with pytest.raises(ConfigError, match=r"run\.out: .*no home folder for '~nobody7'.* \(--set run\.out"):
        load_config(tmp_path / "c.yaml", ["run.out=~nobody7/x"])


@pytest.mark.parametrize("name", ["..", ".", "'...'", "../up", "a/b", r"a\b", '"a\\0b"'])
def test_a_name_that_is_no_part_of_a_path_is_refused(tmp_path, name):
    (tmp_path / "c.yaml").write_text(CONFIG)

    with pytest.raises(ConfigError, match=r"run\.name: got .*, expected text without slashes, and not only dots"):
        load_config(tmp_path / "c.yaml", [f"run.name={name}"])


@pytest.mark.parametrize("name", ["..a", "a..", "run.2", "~"])
def test_dots_within_a_name_are_fine(tmp_path, name):
    (tmp_path / "c.yaml").write_text(CONFIG)

    assert load_config(tmp_path / "c.yaml", [f"run.name='{name}'"]).run.name == name
