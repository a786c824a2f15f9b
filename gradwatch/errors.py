"""Define the errors that a user can fix. The command line prints their text without a traceback, with exit code 2."""

from __future__ import annotations

import difflib
import os
import sysconfig
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

PACKAGE = Path(__file__).parent
# purelib and platlib differ on some systems, such as Fedora: lib and lib64
LIBRARIES = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib"))


class GradwatchError(ValueError):
    """An error that the user can fix. The text gives the place, the value, the expected value and the fix."""


class FindingError(RuntimeError):
    """A finding, raised by `Monitor.step` if `watch` was called with `on_finding="raise"`."""


Key = tuple[str | int, ...]
"""Keys and list positions that lead to a value of a config, such as ("optim", "groups", 0, "match")."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Excerpt:
    """A line of a config with a problem, to print it with a caret.

    Args:
        name: Name of the file, or `command line`.
        line: Number of the line, from 1; 0 if the problem is with the whole file or in an override.
        column: Number of the column, from 1.
        text: Text of the line.
        width: Number of characters to underline.
    """

    name: str
    line: int = 0
    column: int = 0
    text: str = ""
    width: int = 1


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of a config.

    Args:
        key: Keys that lead to the value. For a problem with a whole file or override, the name of the file or override.
        text: The value found and the value expected, without the place.
        place: File and line, such as `configs/mlp.yaml, line 12`, or the override; empty if unknown.
        help: How to fix it; empty if `text` says it.
        excerpt: Line with the problem, or None if unknown.
        is_about_key: Whether the key is wrong, not the value.
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
        """Return the problem with `above` prepended to its key."""
        return replace(self, key=(*above, *self.key))


class ConfigError(GradwatchError):
    """A wrong config, with all of its problems at once."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        # one line per problem: a user fixes all of them before the next try
        super().__init__("\n".join(str(p) for p in self.problems))


class RunError(GradwatchError):
    """A run directory that is missing, is not one, or cannot be read or written."""


class CheckpointError(GradwatchError):
    """A checkpoint that is missing, damaged or does not fit the model."""


class OutOfMemoryError(GradwatchError):
    """A training from a config that ended because an allocation failed."""


class RankError(GradwatchError):
    """The end of a rank because another rank has failed.

    Args:
        text: The message.
        is_mistake: Whether the other rank has failed by a mistake that the user can fix.
    """

    def __init__(self, text: str, *, is_mistake: bool) -> None:
        self.is_mistake = is_mistake
        super().__init__(text)


def dotted(key: Key) -> str:
    """Return a key as the command line writes it, such as `optim.groups.0.match`."""
    return ".".join(map(str, key))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for the nearest known name, or an empty string if none is near."""
    by_folded = {k.casefold(): k for k in known}  # `adamw` must find `AdamW`
    near = difflib.get_close_matches(name.casefold(), by_folded, n=1, cutoff=0.6)  # 0.6 is difflib's default
    return f"; did you mean '{by_folded[near[0]]}'?" if near else ""


def raised(error: BaseException) -> str:
    """Return an error of the user's code with its place: `KeyError: 'k' (mine.py, line 22, in factory)`."""
    # an error without a message would end with a colon
    text = f"{type(error).__name__}: {str(error).strip()}".removesuffix(": ")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_users(f.filename)]
    if not frames or isinstance(error, SyntaxError):  # the text of a syntax error says where it is
        return text
    last = frames[-1]  # the innermost: a library may have raised further inside
    return f"{text} ({shown_path(last.filename)}, line {last.lineno}, in {last.name})"


def is_users(filename: str) -> bool:
    """Return whether a file is the user's own: not of this package, Python or an installed library."""
    # `<frozen importlib._bootstrap>`, `<string>` and the like are not files
    return not filename.startswith("<") and not any(Path(filename).is_relative_to(p) for p in (PACKAGE, *LIBRARIES))


def shown_path(filename: str) -> str:
    """Return a path, relative if the file is below the current folder."""
    return os.path.relpath(filename) if Path(filename).is_relative_to(Path.cwd()) else filename
