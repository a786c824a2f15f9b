"""A config file and what overrides it, `--set` and `--set-file`, as data that knows where each value was written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import yaml
from yaml.nodes import MappingNode, Node, SequenceNode

from gradwatch.config import yaml12
from gradwatch.config.problems import Key, Problem
from gradwatch.config.vocabulary import fold
from gradwatch.config.wording import show
from gradwatch.errors import ConfigError, Mistake, did_you_mean

_HINTS = {
    "expected <block end>": "; is the indentation of this line right?",
    "cannot start any token": "; indent with spaces, and put text with special characters in quotes",
    "mapping values are not allowed": "; put text with a colon in quotes, and indent a section by spaces",
    "expected a single document": "; write one document, without a second `---`",
}
"""What to do about what PyYAML says, by a part of its words."""


@final
class Document:
    """A config as it was written.

    Args:
        text: YAML.
        file: What to call the file in messages.

    Raises:
        ConfigError: The text is not YAML, or no mapping.
    """

    def __init__(self, text: str, *, file: str) -> None:
        self.file = file
        self._malformed: list[Mistake] = []
        self._overrides: list[tuple[Key, str]] = []
        try:
            self._root = yaml12.compose(text)
        except yaml.YAMLError as error:
            raise ConfigError([_not_yaml(error, file)]) from None
        self.data, self._problems = yaml12.to_data(self._root)
        if not isinstance(self.data, dict):
            got = "is empty" if self.data is None else f"holds {show(self.data)}"
            raise ConfigError([Mistake(key=file, problem=f"{got}, expected sections such as model, data and train")])

    def override(self, texts: Sequence[str], *, excludes: Mapping[Key, Key]) -> None:
        """Set values from texts such as `optim.lr=3e-4`, the later the stronger.

        Args:
            texts: A dotted path, `=` and a value in YAML each.
            excludes: What a key removes where it is set, since only one of both can be.
        """
        for text in texts:
            path, equals, value = text.partition("=")
            parts = path.strip().split(".")
            if not equals or not all(parts):
                problem = "expected section.setting=value, such as optim.lr=3e-4"
                self._malformed.append(Mistake(key=f"--set {text}", problem=problem))
                continue
            key = self._as_written(parts)
            self._overrides.append((key, f"--set {text}"))
            try:
                data, found = yaml12.to_data(yaml12.compose(value))
            except yaml.YAMLError as error:
                self._problems.append((key, f"got {value!r}, which is not YAML: {_said(error)}{_hint(error)}"))
                continue
            self._problems += [((*key, *below), problem) for below, problem in found]
            self._override(key, data, excludes)

    def merge(self, changes: Document, *, excludes: Mapping[Key, Key]) -> None:
        """Set the values that another file sets, and leave what it does not name; see `override`."""
        self._problems += changes._problems
        for parts, value in _leaves(changes.data):
            key = self._as_written(parts)
            self._overrides.append((key, changes._place(parts)))
            self._override(key, value, excludes)

    @property
    def overridden(self) -> tuple[Key, ...]:
        """The keys that overrides set."""
        return tuple(key for key, _ in self._overrides)

    def mistakes(self, found: Sequence[Problem]) -> list[Mistake]:
        """Return all mistakes in the order of their lines: those of the writing, and the problems found in the data."""
        first_at_key: dict[Key, str] = {}
        for key, text in (*self._problems, *found):
            first_at_key.setdefault(key, text)
        ordered = sorted(first_at_key, key=lambda key: self._find(key)[0])
        problems = [
            Mistake(key=_dotted(key) or self.file, problem=first_at_key[key], place=self._place(key)) for key in ordered
        ]
        return [*self._malformed, *problems]

    def _place(self, key: Key) -> str:
        line, is_written = self._find(key)
        for overridden, place in reversed(self._overrides):
            is_below = key[: len(overridden)] == overridden
            if is_below or (not is_written and overridden[: len(key)] == key):
                return place
        return f"{self.file}, line {line}" if line else self.file

    def _find(self, key: Key) -> tuple[int, bool]:
        """Return the line of a key or of the nearest mapping around it, and whether the key itself is in the file."""
        node, line = self._root, 0
        for part in key:
            below = _below(node, part)
            if below is None:
                return line, False
            named, node = below
            line = yaml12.line(named)
        return line, True

    def _as_written(self, parts: Sequence[str]) -> Key:
        """Return a dotted path as a key: spelled as in the file where that has it, positions in lists as numbers."""
        here: Any = self.data
        key: list[Any] = []
        for part in parts:
            if isinstance(here, list) and part.isdigit():
                key.append(int(part))
                here = here[int(part)] if int(part) < len(here) else None
            else:
                known = here if isinstance(here, dict) else {}
                key.append(part if part in known else next((k for k in known if fold(k) == fold(part)), part))
                here = known.get(key[-1])
        return tuple(key)

    def _override(self, key: Key, value: Any, excludes: Mapping[Key, Key]) -> None:
        self._set(key, value)
        if key in excludes and excludes[key] not in self.overridden:
            self._remove(excludes[key])

    def _set(self, key: tuple[Any, ...], value: Any) -> None:
        """Set a value, making the mappings on the way where there are none."""
        here: Any = self.data
        for i, part in enumerate(key):
            is_last = i == len(key) - 1
            if isinstance(here, list) and not (isinstance(part, int) and part < len(here)):
                self._problems.append((key, f"{_dotted(key[:i])} has no item {part}, expected 0 to {len(here) - 1}"))
                return
            if not isinstance(here, dict | list):
                self._problems.append((key, f"{_dotted(key[:i])} is {show(here)}, expected a mapping to set {part} in"))
                return
            if is_last:
                here[part] = value
            elif isinstance(here, dict) and here.get(part) is None:
                here[part] = {}
            here = here[part]

    def _remove(self, key: Key) -> None:
        here: Any = self.data
        for part in key[:-1]:
            here = here.get(part) if isinstance(here, dict) else None
        if isinstance(here, dict):
            here.pop(key[-1], None)


def read(path: Path) -> Document:
    """Return the config in a file.

    Raises:
        ConfigError: There is no such file, or it cannot be read as YAML.
    """
    try:
        return Document(path.read_text(encoding="utf-8"), file=str(path))
    except FileNotFoundError:
        near = did_you_mean(path.name, [p.name for p in path.parent.glob("*.y*ml")])
        problem = f"there is no such file{near}"
    except IsADirectoryError:
        problem = "is a folder, expected a YAML file"
        if (path / "config.yaml").is_file():
            problem += f"; to go on with that run: gradwatch train --resume {path}"
    except UnicodeDecodeError:
        problem = "is not text in UTF-8, expected a YAML file"
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    raise ConfigError([Mistake(key=str(path), problem=problem)])


def _below(node: Node | None, part: str | int) -> tuple[Node, Node] | None:
    """Return the node that names a key and the node of its value; both are the item for a position in a list."""
    if isinstance(node, MappingNode):
        return next(((name, value) for name, value in reversed(node.value) if name.value == part), None)
    if isinstance(node, SequenceNode) and isinstance(part, int) and part < len(node.value):
        return node.value[part], node.value[part]
    return None


def _leaves(data: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the values of nested mappings with the keys that lead to them; an empty mapping is a value."""
    for key, value in data.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*above, key))
        else:
            yield (*above, key), value


def _dotted(key: Key) -> str:
    return ".".join(map(str, key))


def _not_yaml(error: yaml.YAMLError, file: str) -> Mistake:
    mark = getattr(error, "problem_mark", None)
    place = f"line {mark.line + 1}, column {mark.column + 1}" if mark else ""
    return Mistake(key=file, problem=f"is not YAML: {_said(error)}{_hint(error)}", place=place)


def _said(error: yaml.YAMLError) -> str:
    said = getattr(error, "problem", None) or getattr(error, "reason", None) or error
    return str(said).removeprefix("but ")


def _hint(error: yaml.YAMLError) -> str:
    said = f"{_said(error)} {getattr(error, 'context', '')}"
    return next((hint for words, hint in _HINTS.items() if words in said), "")
