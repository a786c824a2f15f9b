"""Errors that a user can fix: their text is the whole message, shown without a traceback, exit code 2."""

from __future__ import annotations

import difflib
import os
import sysconfig
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

PACKAGE = Path(__file__).parent
LIBRARIES = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib"))


class GradwatchError(ValueError):
    """A mistake of the user's. The text gives the place, the value, what was expected and what to do."""


class FindingError(RuntimeError):
    """A finding, raised by `Monitor.step` in a loop that asked for it with `on_finding="raise"`."""


Key = tuple[str | int, ...]
"""Keys and list positions that lead to a value of a config, such as ("optim", "groups", 0, "match")."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Excerpt:
    """The line that a problem is in, to show it with a caret.

    Args:
        name: File, or `command line`.
        line: Line, from 1; 0 if the problem is with the whole file or in an override.
        column: Column, from 1.
        text: The line itself.
        width: Number of characters to underline.
    """

    name: str
    line: int = 0
    column: int = 0
    text: str = ""
    width: int = 1


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong in a config.

    Args:
        key: Keys that lead to the value; for a problem with a whole file or override, its name alone.
        text: What was found and what was expected, without the place.
        place: File and line (`configs/mlp.yaml, line 12`) or the override it came from; empty if unknown.
        help: What to do; empty if `text` says it.
        excerpt: The line that the problem is in, or None if unknown.
        is_about_key: Whether the name is wrong, not its value.
    """

    key: Key
    text: str
    place: str = ""
    help: str = ""
    excerpt: Excerpt | None = None
    is_about_key: bool = False

    def __str__(self) -> str:
        text = f"{self.text}; {self.help}" if self.help else self.text
        return f"{dotted(self.key)}: {text}" + (f" ({self.place})" if self.place else "")

    def below(self, *above: str | int) -> Problem:
        """Return the problem with these keys before its own, as seen from further up."""
        return replace(self, key=(*above, *self.key))


class ConfigError(GradwatchError):
    """A config that is wrong, with all of its problems at once."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(p) for p in self.problems))


class RunError(GradwatchError):
    """A run directory that is missing, is not one, or cannot be read or written."""


class CheckpointError(GradwatchError):
    """A run checkpoint that is missing, damaged or does not fit the model."""


def dotted(key: Key) -> str:
    """Return a key as it is written on the command line, such as `optim.groups.0.match`."""
    return ".".join(map(str, key))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for the nearest known name, or an empty string if none is near."""
    by_folded = {k.casefold(): k for k in known}
    near = difflib.get_close_matches(name.casefold(), by_folded, n=1, cutoff=0.6)
    return f"; did you mean '{by_folded[near[0]]}'?" if near else ""


def raised(error: BaseException) -> str:
    """Return what a user's own code raised, and where: `KeyError: 'k' (mine.py, line 22, in factory)`."""
    text = f"{type(error).__name__}: {str(error).strip()}".removesuffix(": ")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_users(f.filename)]
    if not frames or isinstance(error, SyntaxError):  # the text of a syntax error says where it is
        return text
    last = frames[-1]
    return f"{text} ({shown_path(last.filename)}, line {last.lineno}, in {last.name})"


def is_users(filename: str) -> bool:
    """Return whether code is the user's own: not of this package, Python or an installed library."""
    return not filename.startswith("<") and not any(Path(filename).is_relative_to(p) for p in (PACKAGE, *LIBRARIES))


def shown_path(filename: str) -> str:
    """Return a path relative to the current folder if it is below it."""
    return os.path.relpath(filename) if Path(filename).is_relative_to(Path.cwd()) else filename
