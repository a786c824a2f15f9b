"""Combine a config file and its overrides, `--set` and `--set-file`, to data with the place of each value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import yaml

from gradwatch.config import yaml12
from gradwatch.config.names.vocabulary import is_same_name
from gradwatch.config.wording import show
from gradwatch.config.written import File, Override, Source, find
from gradwatch.errors import ConfigError, Excerpt, Key, Problem, did_you_mean, dotted
from gradwatch.paths import RUN_CONFIG

_HINTS = {
    "expected <block end>": "is the indentation of this line right?",
    "cannot start any token": "indent with spaces, and put text with special characters in quotes",
    "mapping values are not allowed": "put text with a colon in quotes, and indent a section by spaces",
    "expected a single document": "write one document, without a second `---`",
}
"""Remedies, with a part of PyYAML's message as key."""


@final
class Document:
    """A config as written by the user.

    Args:
        text: YAML.
        file: Name of the file in messages.

    Raises:
        ConfigError: The text is not YAML, or not a mapping.
    """

    def __init__(self, text: str, *, file: str) -> None:
        self.file = file
        self._malformed: list[Problem] = []  # overrides without a valid key, so without a line to sort by
        self._overrides: list[tuple[Key, Source]] = []
        try:
            root = yaml12.compose(text)
        except yaml.YAMLError as error:
            raise ConfigError([_not_yaml(error, text, file)]) from None  # the problem has PyYAML's message and place
        self._source = File(file, text.splitlines(), root)
        self.data, self._problems = yaml12.to_data(root)
        if not isinstance(self.data, dict):
            got = "is empty" if self.data is None else f"holds {show(self.data)}"
            raise ConfigError([Problem((file,), f"{got}, expected sections such as model, data and train")])

    def override(self, texts: Sequence[str], *, excludes: Mapping[Key, Key]) -> None:
        """Set values from texts such as `optim.lr=3e-4`; later ones have priority. Problems are collected.

        Args:
            texts: Each a dotted path, `=` and a value in YAML.
            excludes: Key to remove when the other key is set, since a config can have only one of both.
        """
        for text in texts:
            path, equals, value = text.partition("=")
            parts = path.strip().split(".")
            if not equals or not all(parts):
                expected = "expected section.setting=value, such as optim.lr=3e-4"
                whole = Override(text).excerpt((), is_about_key=False)
                self._malformed.append(Problem((f"--set {text}",), expected, excerpt=whole))
                continue
            key = self._as_written(parts)
            try:
                root = yaml12.compose(value)
            except yaml.YAMLError as error:
                # although nothing is set, so that the problem is placed in the override, not in the file
                self._overrides.append((key, Override(text, None, key)))
                got = f"got {value!r}, which is not YAML: {_said(error)}"
                self._problems.append(Problem(key, got, help=_hint(error)))
                continue
            self._overrides.append((key, Override(text, root, key)))
            data, found = yaml12.to_data(root)
            self._problems += [p.below(*key) for p in found]
            self._override(key, data, excludes)

    def merge(self, changes: Document, *, excludes: Mapping[Key, Key]) -> None:
        """Set the values of another document, and keep all other values; see `override`."""
        self._problems += changes._problems
        for parts, value in _leaves(changes.data):
            key = self._as_written(parts)
            self._overrides.append((key, changes._source))
            self._override(key, value, excludes)

    @property
    def overridden(self) -> tuple[Key, ...]:
        """The keys that overrides set."""
        return tuple(key for key, _ in self._overrides)

    def place_problems(self, found: Sequence[Problem]) -> list[Problem]:
        """Return the problems of the YAML and the problems `found` in its data, with places, in the order of lines.

        Only the first problem at each key is returned.
        """
        first_at_key: dict[Key, Problem] = {}
        for problem in (*self._problems, *found):
            first_at_key.setdefault(problem.key, problem)
        ordered = sorted(first_at_key, key=self._line)
        return [*self._malformed, *(self._placed(first_at_key[key]) for key in ordered)]

    def _placed(self, problem: Problem) -> Problem:
        key = problem.key
        source = self._source_of(key)
        excerpt = source.excerpt(key, is_about_key=problem.is_about_key)
        return replace(problem, key=key or (self.file,), place=source.place(key), excerpt=excerpt)

    def _source_of(self, key: Key) -> Source:
        """Return the source of the value at a key: the last override of it or of a mapping around it, or the file."""
        is_written = find(self._source.root, key)[2]
        for overridden, source in reversed(self._overrides):
            is_below = key[: len(overridden)] == overridden
            # a section that is not in the file is shown at an override of a setting in it
            if is_below or (not is_written and overridden[: len(key)] == key):
                return source
        return self._source

    def _line(self, key: Key) -> int:
        """Return the line of a key or of the nearest mapping around it in the file; 0 for the whole file."""
        named = find(self._source.root, key)[0]
        return yaml12.line_of(named) if named else 0

    def _as_written(self, parts: Sequence[str]) -> Key:
        """Convert a dotted path to a key: parts spelled as in the file if they exist, positions in lists as numbers."""
        here: Any = self.data
        key: list[Any] = []
        for part in parts:
            if isinstance(here, list) and part.isdigit():
                key.append(int(part))
                here = here[int(part)] if int(part) < len(here) else None
            else:
                known = here if isinstance(here, dict) else {}
                key.append(part if part in known else next((k for k in known if is_same_name(k, part)), part))
                here = known.get(key[-1])
        return tuple(key)

    def _override(self, key: Key, value: Any, excludes: Mapping[Key, Key]) -> None:
        self._set(key, value)
        # if overrides set both, both stay, and validation reports it
        if key in excludes and excludes[key] not in self.overridden:
            self._remove(excludes[key])

    def _set(self, key: tuple[Any, ...], value: Any) -> None:
        """Set a value, and create the mappings that lead to it."""
        here: Any = self.data
        for i, part in enumerate(key):
            is_last = i == len(key) - 1
            if isinstance(here, list) and not (isinstance(part, int) and part < len(here)):
                self._problems.append(
                    Problem(key, f"{dotted(key[:i])} has no item {part}, expected 0 to {len(here) - 1}")
                )
                return
            if not isinstance(here, dict | list):
                text = f"{dotted(key[:i])} is {show(here)}, expected a mapping to set {part} in"
                self._problems.append(Problem(key, text))
                return
            if is_last:
                here[part] = value
            elif isinstance(here, dict) and here.get(part) is None:  # missing, or an empty section
                here[part] = {}
            here = here[part]

    def _remove(self, key: Key) -> None:
        here: Any = self.data
        for part in key[:-1]:
            here = here.get(part) if isinstance(here, dict) else None
        if isinstance(here, dict):
            here.pop(key[-1], None)


def read(path: Path) -> Document:
    """Read the config in a file.

    Raises:
        ConfigError: There is no such file, or it cannot be read as YAML.
    """
    try:
        return Document(path.read_text(encoding="utf-8"), file=str(path))
    except FileNotFoundError:
        near = did_you_mean(path.name, [p.name for p in path.parent.glob("*.y*ml")])
        text = f"there is no such file{near}"
    except IsADirectoryError:
        text = "is a folder, expected a YAML file"
        if (path / RUN_CONFIG).is_file():
            text += f"; to continue that run: gradwatch train --resume {path}"
    except UnicodeDecodeError:
        text = "is not text in UTF-8, expected a YAML file"
    except OSError as error:
        text = f"cannot be read: {error.strerror}"
    raise ConfigError([Problem((str(path),), text)])


def _leaves(data: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the values of nested mappings with their keys; an empty mapping is a value."""
    for key, value in data.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*above, key))
        else:
            yield (*above, key), value


def _not_yaml(error: yaml.YAMLError, text: str, file: str) -> Problem:
    problem = Problem((file,), f"is not YAML: {_said(error)}", help=_hint(error))
    mark = getattr(error, "problem_mark", None)
    if not mark:
        return problem
    lines = text.splitlines() or [""]
    is_at_end = mark.line >= len(lines)  # after the last line break: show the end of the last line
    line, column = (len(lines) - 1, len(lines[-1])) if is_at_end else (mark.line, mark.column)
    excerpt = Excerpt(name=file, line=line + 1, column=column + 1, text=lines[line])
    return replace(problem, place=f"line {mark.line + 1}, column {mark.column + 1}", excerpt=excerpt)


def _said(error: yaml.YAMLError) -> str:
    # ParserError has `problem`, ReaderError has `reason`
    said = getattr(error, "problem", None) or getattr(error, "reason", None) or error
    return str(said).removeprefix("but ")


def _hint(error: yaml.YAMLError) -> str:
    said = f"{_said(error)} {getattr(error, 'context', '')}"
    return next((hint for words, hint in _HINTS.items() if words in said), "")
