"""Attempt a method: an exception costs one call, and several in a row disable the feature for the run."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from gradwatch.attempts import Attempts
from gradwatch.errors import GradwatchError
from gradwatch.probe.place import calling_place


class Attempting(Protocol):
    """An object with the attempts of the monitor."""

    @property
    def attempts(self) -> Attempts:
        """Counts the failures of each feature."""
        ...


S = TypeVar("S", bound=Attempting)
P = ParamSpec("P")
R = TypeVar("R")


def best_effort(
    name: str, *, is_final: bool = False
) -> Callable[[Callable[Concatenate[S, P], R]], Callable[Concatenate[S, P], R | None]]:
    """Decorate a method so that it returns None instead of raising, and is disabled after several failures in a row.

    A GradwatchError is raised, since the user can fix its cause, such as a full disk.

    Args:
        name: The feature, such as `the histograms`. Methods with equal names are disabled together.
        is_final: Whether the first failure disables the feature: a call that failed has lost data.
    """

    def wrap(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R | None]:
        place = method.__qualname__  # one method of a feature may succeed while another fails

        def attempt(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R | None:
            attempts = self.attempts
            if name in attempts.left_out:
                return None
            try:
                result = method(self, *args, **kwargs)
            except GradwatchError:
                raise
            except Exception as error:  # of any kind: the training must not stop
                attempts.conclude(name, error, place=place, is_last=is_final)
                return None
            attempts.conclude(name, None, place=place)
            return result

        functools.update_wrapper(attempt, method)
        return attempt

    return wrap


def warn_once(warned: set[str], name: str, text: str) -> None:
    """Warn, unless a warning of this name was given before.

    Args:
        warned: Names of the warnings that were given.
        name: Name of the warning.
        text: The warning.
    """
    if name not in warned:
        warned.add(name)
        # a hook may warn, with any number of torch's frames between it and the user's code
        place = calling_place()
        warnings.warn_explicit(f"gradwatch: {text}", RuntimeWarning, place.file or "gradwatch", place.line)
