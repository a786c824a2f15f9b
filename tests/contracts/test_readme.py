"""Every example of the README runs, and every file and command that it names is there."""

import os
import re
import shlex
import shutil
from pathlib import Path

import pytest

from gradwatch.cli import main
from gradwatch.config.ineffective import ineffective_settings
from gradwatch.config.load import load_config
from gradwatch.detect import detectors

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.M | re.S)


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """Run in an empty folder that has the configs."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_python_examples_run_one_after_the_other(checkout, capsys):
    names = {}

    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), names)

    assert names["norms_TL"].shape == (50, 4)
    assert capsys.readouterr().out


def test_the_first_example_runs_a_second_time(checkout, capsys):
    for _ in range(2):
        exec(compile(blocks("python")[0], "README.md", "exec"), {})

    assert sorted(path.name for path in Path("runs").iterdir()) == ["mine", "mine-2"]
    assert capsys.readouterr().err == "gradwatch: runs/mine already holds a run; this one is written to runs/mine-2\n"


def test_the_yaml_example_trains_without_a_warning(checkout):
    (block,) = blocks("yaml")
    path = checkout / "digits-mlp.yaml"
    path.write_text(block)

    assert ineffective_settings(load_config(path)) == ()
    assert main(["train", str(path), "--set", "train.epochs=1", "--log-format", "plain"]) == 0


def commands():
    lines = [line for block in blocks("console") for line in block.splitlines()]
    return [c for line in lines for c in line.partition("#")[0].strip().split(" && ") if c.startswith("gradwatch ")]


@pytest.fixture(scope="module")
def cure(tmp_path_factory):
    """Return the cure that is found for the run of the examples."""
    folder = tmp_path_factory.mktemp("ill")
    path = folder / "cure.yaml"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        main(["train", "configs/clinic/non-finite.yaml", "--set", f"run.out={folder}/runs", "--fail-on", "never"])
        main(["diagnose", str(next((folder / "runs").iterdir())), "--patch", str(path)])
    return path


@pytest.mark.parametrize("command", commands())
def test_a_command_runs(command, checkout, capsys, request):
    if "cure.yaml" in command and "--patch" not in command:
        shutil.copy(request.getfixturevalue("cure"), checkout)
    if re.search(r"\bruns\b", command):
        exec(compile(blocks("python")[0], "README.md", "exec"), {})

    if made := re.search(r"runs/\*-([a-z-]+)", command):
        main(["train", f"configs/clinic/{made[1]}.yaml", "--fail-on", "never"])
        command = command.replace(made[0], str(next(Path().glob(made[0]))))
    code = main(shlex.split(command)[1:])

    assert code == 0, capsys.readouterr().err
    assert capsys.readouterr().out


def test_every_kind_that_is_detected_is_in_the_table_with_its_code():
    rows = dict(re.findall(r"^\| (GW\d+) \| ([a-z0-9-]+) \|", README, re.M))

    assert rows == {d.code: d.kind for d in detectors()}


def test_every_file_that_is_named_is_there():
    named = re.findall(r"`((?:configs|scripts|tests|gradwatch)/[\w./-]+\.\w+)`", README)
    pictures = re.findall(r"\]\((\.github/[\w./-]+)\)", README)

    missing = [name for name in (*named, *pictures) if not (ROOT / name).exists()]

    assert named
    assert not missing, os.linesep.join(missing)
