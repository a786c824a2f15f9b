"""Names say what they are: class names are unique, folders are small, and words that explain nothing stay out."""

import ast
import collections
import re
from pathlib import Path

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


def test_no_banned_word_comes_back():
    found = [
        f"{named(path)}:{i}: {line.strip()}"
        for path in SOURCES
        for i, line in enumerate(path.read_text().splitlines(), 1)
        if BANNED.search(line)
    ]

    assert found == []


def test_no_folder_is_a_heap():
    counts = collections.Counter(path.parent for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")

    assert {named(folder): count for folder, count in counts.items() if count > MAX_MODULES} == {}


def too_long(path):
    """Return which classes and functions of a file are too long, and how long."""
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
    return long


def test_classes_and_functions_are_read_in_one_sitting():
    found = {named(path): too_long(path) for path in PACKAGE.rglob("*.py")}

    assert {name: long for name, long in found.items() if long} == {}


def test_a_detector_file_is_read_in_one_sitting():
    lines = {}
    for path in (p for p in (PACKAGE / "detect").rglob("*.py") if "features" not in p.parts):
        text = path.read_text()
        functions = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef))
        lines[named(path)] = len(text.splitlines()) - sum(length(node) for node in functions if node.name == "examples")

    assert {name: count for name, count in lines.items() if count > MAX_DETECTOR_LINES} == {}
