"""Mistakes that a user can mend: their text is the whole message, shown without a traceback, exit code 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class GradwatchError(ValueError):
    """A mistake of the user's. The text says the place, the value, what was expected and the way out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """One thing that is wrong in a config.

    Args:
        key: Dotted path of the value, such as `train.precision`.
        problem: What was found and what was expected, without the place.
        place: File and line (`configs/mlp.yaml, line 12`) or the override it came from; empty where unknown.
    """

    key: str
    problem: str
    place: str = ""

    def __str__(self) -> str:
        return f"{self.key}: {self.problem}" + (f" ({self.place})" if self.place else "")


class ConfigError(GradwatchError):
    """A config that cannot be used, with all of its mistakes at once."""

    def __init__(self, mistakes: Sequence[Mistake]) -> None:
        self.mistakes = tuple(mistakes)
        super().__init__("\n".join(str(m) for m in self.mistakes))


class RunError(GradwatchError):
    """A run directory that is missing, is none, or cannot be read or written."""


class CheckpointError(GradwatchError):
    """A run checkpoint that is missing, damaged or does not fit the model."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for the nearest known name, or an empty string where none is near."""
    by_folded = {k.casefold(): k for k in known}
    near = difflib.get_close_matches(name.casefold(), by_folded, n=1, cutoff=0.6)
    return f"; did you mean '{by_folded[near[0]]}'?" if near else ""
