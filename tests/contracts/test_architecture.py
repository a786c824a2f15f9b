"""Rules of the house that a linter does not know, each with its reason."""

import ast
import functools
import re
from pathlib import Path

import pytest

from gradwatch import events
from gradwatch.events import KINDS

PACKAGE = Path(__file__).parents[2] / "gradwatch"
FILES = sorted(PACKAGE.rglob("*.py"))
TEXTS = {path: path.read_text() for path in FILES}


@functools.cache
def tree_of(path):
    return ast.parse(TEXTS[path])


def named(path):
    return str(path.relative_to(PACKAGE))


def found_in(files, find):
    """Return what a function finds in files, by their names; tests of each file alone would take minutes."""
    return {named(path): found for path in files if (found := find(path))}


def test_a_file_opens_with_one_sentence_that_says_what_lives_there():
    first_lines = {named(path): (ast.get_docstring(tree_of(path)) or "").partition("\n")[0] for path in FILES}

    assert {name: line for name, line in first_lines.items() if not line.endswith((".", "?", ":"))} == {}, (
        "the first line of a file is its line on the map"
    )


def test_nothing_that_is_loaded_is_code():
    code = re.compile(r"\bpickle\b.*\bload|yaml\.(unsafe_)?load\(|weights_only=False|(?<![.\w])(eval|exec)\(")

    assert found_in(FILES, lambda path: code.findall(TEXTS[path])) == {}, (
        "a run directory, a config and a checkpoint are data: they may come from anybody"
    )


WAITS = re.compile(r"\.(item|cpu|numpy|tolist)\(\)")
WAITING_POINT = "probe/device/sync.py"


def test_the_device_is_waited_for_in_one_place():
    files = [p for p in FILES if p.relative_to(PACKAGE).parts[0] in {"probe", "train", "monitor"}]

    assert found_in(files, lambda path: WAITS.findall(TEXTS[path])).keys() <= {WAITING_POINT}, (
        "every .item() is a synchronisation: take to_host or to_float of probe/device/sync.py"
    )


def test_the_package_reaches_for_nothing_of_the_tests_or_scripts():
    users = [named(p) for p in FILES if re.search(r"^\s*(from|import) (tests|scripts|configs)\b", TEXTS[p], re.M)]

    assert users == []


EVENT_NAMES = {name for name in KINDS if "-" in name}
"""Names without a hyphen, such as `rewind`, are ordinary words too."""


def test_event_kinds_are_written_in_the_catalogue_alone():
    others = [path for path in FILES if named(path) != "events.py"]

    def literals(path):
        nodes = ast.walk(tree_of(path))
        return [node.value for node in nodes if isinstance(node, ast.Constant) and node.value in EVENT_NAMES]

    def made(path):
        return [
            node.lineno
            for node in ast.walk(tree_of(path))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Event"
            for keyword in node.keywords
            if keyword.arg == "kind" and isinstance(keyword.value, ast.Constant)
        ]

    assert found_in(others, literals) == {}, (
        "import the constant from gradwatch/events.py: a misspelt kind would never be found"
    )
    assert found_in(others, made) == {}, "make events by `KIND.emit(...)`: it checks the values and formats the text"


def test_every_event_kind_is_emitted_and_no_other_is():
    """Each constant is used by a producer; producers can only use constants, since an unknown one does not import."""
    producers = [p for p in FILES if named(p).partition("/")[0] not in {"detect", "diagnose", "render", "events.py"}]
    emitted = {
        name
        for path in producers
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ImportFrom) and node.module == "gradwatch.events"
        for name in (alias.name for alias in node.names)
    }
    constants = {name for name, kind in vars(events).items() if isinstance(kind, events.EventKind)}

    assert constants - emitted == set(), "in the catalogue, and never emitted"


WORDS_FOR_PEOPLE = {"text", "message", "label"}
READS = {"startswith", "endswith", "partition", "rpartition", "split", "find", "index", "removeprefix", "removesuffix"}
QUANTITY_NAMES = {"q", "quantity", "evidence"}
MAY_READ_WORDS = ("render/", "cli/output/")


def comparisons_of_words(tree):
    """Yield the lines in which code decides by words that are made for people.

    Words are `.text`, `.message` and `.label` of anything, and `.name` of what a loop over `.evidence` gives. Code
    decides where it compares them, looks for them in a container, matches on them, takes them apart, uses them as the
    key of a dict, or hands them to `re`. A message may be passed on, put into another one and printed. A reader of
    YAML or source text is not caught as long as it names what it reads otherwise.
    """
    quantities = set(QUANTITY_NAMES)
    for node in ast.walk(tree):
        loops = isinstance(node, (ast.comprehension, ast.For)) and isinstance(node.target, ast.Name)
        if loops and any(isinstance(it, ast.Attribute) and it.attr == "evidence" for it in ast.walk(node.iter)):
            quantities.add(node.target.id)

    def are_words(node):
        if not isinstance(node, ast.Attribute):
            return False
        of_quantity = node.attr == "name" and isinstance(node.value, ast.Name) and node.value.id in quantities
        return node.attr in WORDS_FOR_PEOPLE or of_quantity

    for node in ast.walk(tree):
        match node:
            case ast.Compare(left=left, comparators=others):
                decided = [left, *others]
            case ast.Call(func=ast.Attribute(value=value, attr=attr)) if attr in READS:
                decided = [value]
            case ast.Call(func=ast.Attribute(value=ast.Name(id="re")), args=args):
                decided = args
            case ast.Match(subject=subject):
                decided = [subject]
            case ast.DictComp(key=key):
                decided = [key]
            case ast.Subscript(slice=key):
                decided = [key]
            case _:
                continue
        if any(map(are_words, decided)):
            yield node.lineno


def test_code_decides_by_keys_and_not_by_words_for_people():
    others = [path for path in FILES if not named(path).startswith(MAY_READ_WORDS)]

    assert found_in(others, lambda path: [*comparisons_of_words(tree_of(path))]) == {}, (
        "a message is free to be reworded: compare kind, key or id"
    )


@pytest.mark.parametrize(
    "code",
    [
        'event.text == "cut"',
        '"cut" in event.text',
        'finding.message.startswith("the loss")',
        'quantity.label.rpartition(" since ")',
        '[q for q in finding.evidence if q.name == "gain"]',
        "{it.name: it.value for it in finding.evidence}",
        "KEYS[q.name]",
        're.search("cut", event.text)',
        "match finding.message:\n    case 'a': pass",
    ],
)
def test_code_that_decides_by_words_would_be_caught(code):
    assert [*comparisons_of_words(ast.parse(code))]


@pytest.mark.parametrize(
    "code",
    ['f"{event.text} again"', "texts.append(event.text)", "event.kind == CUT.name", 'layer.name == "fc1.weight"'],
)
def test_words_may_be_passed_on(code):
    assert not [*comparisons_of_words(ast.parse(code))]
