"""The whole tree is linted, formatted, typed, and imports only downwards."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(["ruff", "check", "--no-cache"], id="lint"),
        pytest.param(["ruff", "format", "--check", "--no-cache"], id="format"),
        # a cache that nobody reads takes a third of the time
        pytest.param(["mypy", "--no-error-summary", "--cache-dir", os.devnull], id="types"),
        pytest.param(["lint-imports", "--no-cache"], id="imports"),
    ],
)
def test_the_tree_passes(check: list[str]):
    tool = shutil.which(check[0], path=Path(sys.executable).parent)
    assert tool, f"{check[0]} is not installed: pip install -e '.[dev]'"

    done = subprocess.run([tool, *check[1:]], cwd=ROOT, capture_output=True, text=True)

    assert done.returncode == 0, done.stdout + done.stderr
