"""What training can do without: a method that raises is named in one warning and left out from then on."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from gradwatch.errors import GradwatchError


class Warns(Protocol):
    """Something that remembers what it has warned of."""

    warned: set[str]


S = TypeVar("S", bound=Warns)
P = ParamSpec("P")
R = TypeVar("R")


def dispensable(
    name: str,
) -> Callable[[Callable[Concatenate[S, P], R]], Callable[Concatenate[S, P], R | None]]:
    """Make a method one that training can do without.

    When it raises, that is said once, and from then on it does nothing and returns None. What the user can mend, such
    as a full disk, is raised.

    Args:
        name: What is left out, such as `the histograms`; methods of one name are left out together.
    """

    def wrap(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R | None]:
        def attempt(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R | None:
            if name in self.warned:
                return None
            try:
                return method(self, *args, **kwargs)
            except GradwatchError:
                raise
            except Exception as error:  # whatever it is, the training is worth more
                switch_off(self, name, error)
                return None

        functools.update_wrapper(attempt, method)
        return attempt

    return wrap


def switch_off(owner: Warns, name: str, error: Exception) -> None:
    """Say that a part is left out from now on, and why."""
    warn_once(owner, name, f"{name} is switched off: {type(error).__name__}: {error}")


def warn_once(owner: Warns, name: str, text: str) -> None:
    """Warn of something, the first time that it comes up."""
    if name not in owner.warned:
        owner.warned.add(name)
        warnings.warn(f"gradwatch: {text}", RuntimeWarning, stacklevel=4)
