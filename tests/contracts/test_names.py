"""Names say what they are: class names are unique, folders are small, and words that explain nothing stay out."""

import ast
import collections
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "gradwatch"
SOURCES = sorted(p for pattern in ("*.py", "*.c", "*.h") for p in PACKAGE.rglob(pattern))
MAX_MODULES = 16
MAX_CLASS_LINES, MAX_METHODS, MAX_FUNCTION_LINES = 250, 20, 60
MAX_DETECTOR_LINES = 250

BANNED = re.compile(
    r"theatre|rehears|\bstaging\b(?! buffer)|\bscenes?\b|\bstrays?\b|\bleftovers?\b|\bparcels?\b|dispensable"
    r"|autops|\banew\b|in the place of|more seldom|under way|\bwhoever\b",
    re.IGNORECASE,
)
"""Words of plays, households and courts, and old turns of phrase: the field has its own words."""


def named(path):
    return str(path.relative_to(PACKAGE))


def classes(path):
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)]


def length(node):
    return node.end_lineno - node.lineno + 1


def is_docstring(statement):
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def is_special(method):
    """Return whether a method is read as an attribute or an operator: a property, `__init__`, `__len__`."""
    is_property = any(isinstance(d, ast.Name) and d.id == "property" for d in method.decorator_list)
    return is_property or method.name.startswith("__")


def test_class_names_are_unique():
    where = collections.defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        # blocks of models may share their names; `Watch` is the callback of each library, under its own import path
        if path.relative_to(PACKAGE).parts[0] not in ("models", "callbacks"):
            for node in classes(path):
                where[node.name].append(f"{named(path)}:{node.lineno}")

    assert {name: places for name, places in where.items() if len(places) > 1} == {}


@pytest.mark.parametrize("path", SOURCES, ids=named)
def test_no_banned_word_comes_back(path):
    found = [f"{i}: {line.strip()}" for i, line in enumerate(path.read_text().splitlines(), 1) if BANNED.search(line)]

    assert found == []


def test_no_folder_is_a_heap():
    counts = collections.Counter(path.parent for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")

    assert {named(folder): count for folder, count in counts.items() if count > MAX_MODULES} == {}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=named)
def test_classes_and_functions_are_read_in_one_sitting(path):
    long = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef):
            methods = [m for m in node.body if isinstance(m, ast.FunctionDef) and not is_special(m)]
            examples = sum(length(m) for m in methods if m.name == "examples")
            if length(node) - examples > MAX_CLASS_LINES or len(methods) > MAX_METHODS:
                long.append(f"{node.name}: {length(node)} lines, {len(methods)} methods")
        elif isinstance(node, ast.FunctionDef) and node.name != "examples":  # examples are data, not logic
            body = [statement for statement in node.body if not is_docstring(statement)]
            lines = node.end_lineno - body[0].lineno + 1 if body else 0
            if lines > MAX_FUNCTION_LINES:
                long.append(f"{node.name}: {lines} lines")

    assert long == []


@pytest.mark.parametrize(
    "path", [p for p in sorted((PACKAGE / "detect").rglob("*.py")) if "features" not in p.parts], ids=named
)
def test_a_detector_file_is_read_in_one_sitting(path):
    text = path.read_text()
    examples = sum(
        node.end_lineno - node.lineno + 1
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef) and node.name == "examples"
    )

    assert len(text.splitlines()) - examples <= MAX_DETECTOR_LINES
