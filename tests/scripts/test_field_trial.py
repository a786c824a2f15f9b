"""The field trial takes scripts from projects, and tells what gradwatch says of them."""

import json
import tarfile

import pytest

from scripts.studies import field_trial
from scripts.studies.field_trial import Place, Row, Script, adapt, format_table, read_list, wilson

SCRIPT = """
import sys
import torch
from torch import nn

torch.manual_seed(0)
model = nn.ModuleDict({"used": nn.Linear(8, 1), "unused": nn.Linear(8, 1)})
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(STEPS):
    inputs = torch.randn(64, 8)
    loss = (model["used"](inputs) - inputs.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
sys.exit(3)
"""

BACKEND = """
import pathlib

def prepare_metadata_for_build_wheel(directory, config_settings=None):
    folder = pathlib.Path(directory, "fake-1.0.dist-info")
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\\nName: fake\\nVersion: 1.0\\n")
    return folder.name
"""
"""A build backend that needs no package, so that pip can read the metadata without a network."""

LIST = """
projects:
  - package: fake==1.0
    install: []
    scripts:
      train:
        command: [examples/train.py]
        edits: {examples/train.py: {STEPS: "40"}}
"""


@pytest.fixture
def distribution(tmp_path, monkeypatch):
    """Offer a source distribution with one script to pip, and nothing else."""
    source = tmp_path / "fake-1.0"
    (source / "examples").mkdir(parents=True)
    (source / "examples" / "train.py").write_text(SCRIPT)
    (source / "backend.py").write_text(BACKEND)
    system = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    (source / "pyproject.toml").write_text(system)
    (source / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: fake\nVersion: 1.0\n")
    (tmp_path / "offered").mkdir()
    with tarfile.open(tmp_path / "offered" / "fake-1.0.tar.gz", "w:gz") as tar:
        tar.add(source, "fake-1.0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "offered"))
    return tmp_path


def test_a_trial_tells_the_findings_of_a_script_of_a_source_distribution(distribution, monkeypatch, capsys):
    listed = distribution / "list.yaml"
    listed.write_text(LIST)
    monkeypatch.setattr("sys.argv", ["field_trial.py", str(distribution / "trial"), "--list", str(listed)])

    field_trial.main()

    (row,) = json.loads((distribution / "trial" / "table.json").read_text())
    assert (row["script"], row["steps"], row["bare_exit"], row["exit"]) == ("fake/train", 40, 3, 3)
    assert [finding["kind"] for finding in row["findings"]] == ["no-gradient"]
    assert row["unjudged"] == ["no-gradient"]
    table = (distribution / "trial" / "table.md").read_text()
    assert "| fake/train | 40 | 3 |" in table
    assert "0 of 1 scripts had a false alarm: 0% [0%, 79%]. 1 have one to judge." in table


COMMIT = "0123456789" * 4

REPOSITORY = f"""
projects:
  - repository: owner/fake
    commit: "{COMMIT}"
    files: [examples/my train.py]
    install: []
    scripts:
      train:
        command: [examples/my train.py]
        edits: {{examples/my train.py: {{STEPS: "40"}}}}
"""


def run_repository(folder, monkeypatch):
    """Run the trial of the repository, and return its row of the table."""
    listed = folder / "list.yaml"
    listed.write_text(REPOSITORY)
    monkeypatch.setattr("sys.argv", ["field_trial.py", str(folder / "trial"), "--list", str(listed), "--bare"])
    field_trial.main()
    (row,) = json.loads((folder / "trial" / "table.json").read_text())
    return row["script"], row["bare_exit"]


def test_a_trial_downloads_a_file_of_a_repository_at_its_commit(tmp_path, monkeypatch):
    served = tmp_path / "github" / "owner" / "fake" / COMMIT / "examples" / "my train.py"
    served.parent.mkdir(parents=True)
    served.write_text(SCRIPT)
    monkeypatch.setattr(field_trial, "GITHUB", (tmp_path / "github").as_uri())

    row = run_repository(tmp_path, monkeypatch)

    assert row == ("owner/fake/train", 3)
    kept = tmp_path / "trial" / "downloads" / "owner" / "fake" / "examples" / "my train.py"
    assert kept.read_text() == SCRIPT  # the texts are replaced in a copy


def test_a_trial_takes_a_file_of_a_repository_from_its_folder(tmp_path, monkeypatch):
    kept = tmp_path / "trial" / "downloads" / "owner" / "fake" / "examples" / "my train.py"
    kept.parent.mkdir(parents=True)
    kept.write_text(SCRIPT)
    monkeypatch.setattr(field_trial, "GITHUB", (tmp_path / "nothing").as_uri())

    assert run_repository(tmp_path, monkeypatch) == ("owner/fake/train", 3)


def test_a_text_to_replace_that_is_not_there_is_an_error(tmp_path):
    (tmp_path / "train.py").write_text("epochs = 10\n")
    script = Script(command=("train.py",), edits={"train.py": {"epochs = 100": "epochs = 1"}})

    with pytest.raises(ValueError, match="got no 'epochs = 100' to replace"):
        adapt(script, Place(folder=tmp_path, root=tmp_path, source=tmp_path, python=tmp_path))


def test_the_table_counts_scripts_and_not_findings():
    findings = [{"kind": kind, "severity": "warning"} for kind in ("no-gradient", "dead-layer")]
    alarmed = Row(
        script="a/b",
        bare_exit=0,
        bare_s=2.0,
        exit=0,
        watched_s=3.0,
        steps=10,
        findings=findings,
        false_alarms=["dead-layer", "no-gradient"],
    )

    table = format_table([alarmed, Row(script="a/c", bare_exit=0, bare_s=1.0, exit=1, watched_s=1.0, steps=5)])

    assert "| a/b | 10 | 0 | 3 s, 1.50x | `dead-layer`; `no-gradient` |  |" in table
    assert "| a/c | 5 | 1 instead of 0 |" in table
    assert "1 of 2 scripts had a false alarm: 50%" in table


def test_the_interval_is_that_of_wilson():
    low, high = wilson(12, 74)

    assert (round(low, 3), round(high, 3)) == (0.095, 0.262)


def test_the_list_names_scripts_of_many_projects():
    projects = read_list(field_trial.LIST)

    assert len({project.label for project in projects}) == len(projects) >= 12
    assert sum(len(project.scripts) for project in projects) >= 40
