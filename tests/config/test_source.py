"""Finding definitions across files, and values of constants, without running them."""

import ast
import sys

import pytest

from gradwatch.config.source import UNKNOWN, load, locate
from gradwatch.errors import GradwatchError


@pytest.fixture
def source(tmp_path):
    (tmp_path / "base.py").write_text("class Base: ...\nSIZE = 2\n_hidden = 1\n")
    (tmp_path / "stars.py").write_text("class FromStar: ...\n")
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("from ..base import Base as Inner\n")
    text = """
from typing import TYPE_CHECKING
from .base import Base as Renamed, SIZE
from .pack import Inner
from .stars import *
from nowhere.at_all import Lost
if TYPE_CHECKING:
    from .base import _hidden
HALF = 1.0 / 3
PAIR = (SIZE, HALF)
RUN = run()
BITS = 1 << 4
"""
    (tmp_path / "main.py").write_text(text)
    return load(tmp_path / "main.py")


@pytest.mark.parametrize(
    ("name", "file", "found"),
    [("Renamed", "base.py", "Base"), ("Inner", "base.py", "Base"), ("FromStar", "stars.py", "FromStar")],
)
def test_a_name_is_followed_through_imports_to_the_file_that_defines_it(source, name, file, found):
    home, node = source.find(name)

    assert (home.path.name, node.name) == (file, found)


def test_imports_below_type_checking_are_followed_too(source):
    home, node = source.find("_hidden")

    assert (home.path.name, ast.unparse(node)) == ("base.py", "1")


@pytest.mark.parametrize("name", ["Lost", "never_heard_of"])
def test_a_name_out_of_sight_is_not_found(source, name):
    assert source.find(name) is None


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("-3", -3),
        ("'relu'", "relu"),
        ("HALF", 1 / 3),
        ("PAIR", (2, 1 / 3)),
        ("BITS", 16),
        ("(1, 2)", (1, 2)),
        ("2 * SIZE + 1", 5),
        ("RUN", UNKNOWN),
        ("(1, RUN)", UNKNOWN),
        ("RUN * 2", UNKNOWN),
        ("open('x')", UNKNOWN),
    ],
)
def test_constants_have_a_value_and_calls_have_none(source, expression, value):
    found = source.value(ast.parse(expression, mode="eval").body)

    assert found is value if value is UNKNOWN else found == value


def test_a_module_is_located_without_importing_it(tmp_path, monkeypatch):
    (tmp_path / "never_imported").mkdir()
    (tmp_path / "never_imported" / "__init__.py").write_text("raise RuntimeError\n")
    (tmp_path / "never_imported" / "inner.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)

    path = locate("never_imported.inner")

    assert path == tmp_path / "never_imported" / "inner.py"
    assert "never_imported" not in sys.modules


def test_a_module_that_is_not_installed_is_nowhere():
    assert locate("no_such_package_at_all.inner") is None


def test_a_file_that_is_no_python_is_a_mistake_with_its_line(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("x = 1\ndef build(:\n")

    with pytest.raises(GradwatchError, match=r"broken\.py, line 2: not valid Python"):
        load(path)
