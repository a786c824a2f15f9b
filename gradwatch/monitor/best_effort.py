"""Disable a feature at its first exception, with a single warning, and let the training continue."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from gradwatch.errors import GradwatchError


class Warns(Protocol):
    """An object that remembers the names of the warnings it gave."""

    warned: set[str]


S = TypeVar("S", bound=Warns)
P = ParamSpec("P")
R = TypeVar("R")


def best_effort(
    name: str,
) -> Callable[[Callable[Concatenate[S, P], R]], Callable[Concatenate[S, P], R | None]]:
    """Decorate a method so that its first exception disables it with a warning. It returns None after that.

    A GradwatchError is raised, since the user can fix its cause, such as a full disk.

    Args:
        name: The feature, such as `the histograms`. Methods with equal names are disabled together.
    """

    def wrap(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R | None]:
        def attempt(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R | None:
            if name in self.warned:  # a feature that failed once would fail, and warn, at every step
                return None
            try:
                return method(self, *args, **kwargs)
            except GradwatchError:
                raise
            except Exception as error:  # of any kind: the training must not stop
                disable_feature(self, name, error)
                return None

        functools.update_wrapper(attempt, method)
        return attempt

    return wrap


def disable_feature(owner: Warns, name: str, error: Exception) -> None:
    """Warn that a feature is disabled, and name the exception."""
    warn_once(owner, name, f"{name} is disabled: {type(error).__name__}: {error}")


def warn_once(owner: Warns, name: str, text: str) -> None:
    """Warn, unless a warning of this name was given before."""
    if name not in owner.warned:
        owner.warned.add(name)
        # level 4 is the caller of the decorated method: warn_once, disable_feature and attempt lie between
        warnings.warn(f"gradwatch: {text}", RuntimeWarning, stacklevel=4)
