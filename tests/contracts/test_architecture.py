"""Rules of the house that a linter does not know, each with its reason."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "gradwatch"
FILES = sorted(PACKAGE.rglob("*.py"))


def named(path):
    return str(path.relative_to(PACKAGE))


@pytest.mark.parametrize("path", FILES, ids=named)
def test_a_file_opens_with_one_sentence_that_says_what_lives_there(path):
    docstring = ast.get_docstring(ast.parse(path.read_text()))

    assert docstring, "the first line of a file is its line on the map"
    assert docstring.splitlines()[0].endswith((".", "?", ":")), docstring.splitlines()[0]


@pytest.mark.parametrize("path", FILES, ids=named)
def test_nothing_that_is_loaded_is_code(path):
    text = path.read_text()

    assert not re.search(
        r"\bpickle\b.*\bload|yaml\.(unsafe_)?load\(|weights_only=False|(?<![.\w])(eval|exec)\(", text
    ), "a run directory, a config and a checkpoint are data: they may come from anybody"


WAITS = re.compile(r"\.(item|cpu|numpy|tolist)\(\)")
WAITING_POINT = "probe/device/sync.py"


@pytest.mark.parametrize(
    "path",
    [p for p in FILES if p.relative_to(PACKAGE).parts[0] in {"probe", "train", "monitor"}],
    ids=named,
)
def test_the_device_is_waited_for_in_one_place(path):
    if named(path) == WAITING_POINT:
        return

    found = WAITS.findall(path.read_text())

    assert not found, "every .item() is a synchronisation: take to_host or to_float of probe/device/sync.py"


def test_the_package_reaches_for_nothing_of_the_tests_or_scripts():
    users = [named(p) for p in FILES if re.search(r"^\s*(from|import) (tests|scripts|configs)\b", p.read_text(), re.M)]

    assert users == []
