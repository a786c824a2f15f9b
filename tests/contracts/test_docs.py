"""The architecture page names places that exist, and its picture is the one that the import contracts draw."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "gradwatch"
PAGE = (ROOT / "docs" / "architecture.md").read_text()
PLACES = re.findall(r"`([\w/]+\.(?:py|h|c))(?::([\w.]+))?`", PAGE)


def names_of(path):
    """Return the names that a Python file defines, methods with their class; of a C file its whole text."""
    if path.suffix != ".py":
        return set(re.findall(r"\b\w+\b", path.read_text()))
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{m.name}" for m in node.body if isinstance(m, ast.FunctionDef)}
    return found


@pytest.mark.parametrize(("file", "name"), sorted(set(PLACES)))
def test_a_place_that_the_architecture_page_names_exists(file, name):
    path = next((home / file for home in (ROOT, PACKAGE) if (home / file).is_file()), None)

    assert path, f"{file} is no file of the repository or the package"
    assert not name or name in names_of(path), f"{file} has no {name}"


@pytest.mark.parametrize("folder", sorted(set(re.findall(r"`((?:\w+/)+)`", PAGE))))
def test_a_folder_that_the_architecture_page_names_exists(folder):
    homes = [PACKAGE, ROOT, *(p for p in PACKAGE.iterdir() if p.is_dir())]

    assert any((home / folder).is_dir() for home in homes), folder


def test_the_picture_of_the_layers_is_up_to_date():
    spec = importlib.util.spec_from_file_location("draw_layers", ROOT / "scripts" / "tools" / "draw_layers.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)

    assert tool.PICTURE.read_text() == tool.draw((ROOT / "pyproject.toml").read_text()), (
        "run: python scripts/tools/draw_layers.py"
    )
