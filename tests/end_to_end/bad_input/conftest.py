"""A folder with a config and a user's own modules, and a command in it."""

import sys

import pytest
from end_to_end.bad_input.commands import CONFIG, USERS_CODE

from gradwatch.cli import main


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a folder to work in, with a config and a user's own modules."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text(CONFIG)
    (tmp_path / "mine.py").write_text(USERS_CODE)
    (tmp_path / "broken.py").write_text("def model(\n")
    (tmp_path / "failing.py").write_text("raise OSError('no licence')\n")
    (tmp_path / "needing.py").write_text("import surely_not_installed\n")
    (tmp_path / "header.csv").write_text("a,b,label\n")
    (tmp_path / "noise.npz").write_bytes(b"no zip")
    yield tmp_path
    for name in ("mine", "broken", "failing", "needing"):
        sys.modules.pop(name, None)
    sys.path[:] = [path for path in sys.path if path != str(tmp_path)]


@pytest.fixture
def train(folder, capsys):
    """Return a function that trains with overrides and returns the exit code, and what was written to both outputs."""

    def run(*args):
        code = main(["train", *map(str, args)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run
