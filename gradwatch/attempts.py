"""Attempt the parts of the monitor: an exception costs one attempt, and several in a row end the part. No torch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar, final

from gradwatch.errors import GradwatchError
from gradwatch.events import LEFT_OUT, Observation

MAX_FAILURES = 3
"""Failures of a part in a row after which it is left out. 3: the graph of the loss is read at 3 steps."""

MAX_REASON_LENGTH = 100
"""Maximum length of the message of an exception that is shown: longer ones list internals, such as dispatch keys."""

DETECTOR, SINK = "detector ", "sink "
"""Prefixes of the names of parts."""

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")


@final
class Attempts:
    """Attempts parts of the monitor, such as a rule or a probe, which may raise on an unusual input.

    An exception costs one attempt: the part is attempted again with the next input. After `MAX_FAILURES` failures in a
    row, the part is left out for the rest of the run. A `GradwatchError` is raised, since the user can fix its cause.

    Args:
        report: Called with an observation for each part that is left out.
        warned: Names of the warnings that were given, shared with other objects that warn. The first check that is left
            out causes a warning. The run records the others.

    Attributes:
        left_out: Names of the parts that are left out.
    """

    def __init__(
        self, report: Callable[[Observation], object] | None = None, *, warned: set[str] | None = None
    ) -> None:
        self.warned = set() if warned is None else warned
        self.left_out: set[str] = set()
        self._report = report
        self._failures: dict[str, tuple[str, int, str]] = {}  # by place: part, failures in a row, newest reason

    def run(self, part: str, action: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | None:
        """Return the result of an action, or None if it raises or its part is left out."""
        return next(iter(self.each(part, lambda _: action(*args, **kwargs), (None,))), None)

    def each(self, part: str, action: Callable[[T], R], inputs: Iterable[T]) -> list[R]:
        """Return the results of an action for each input, without the inputs on which it raises.

        All inputs together are one attempt. It fails if the action raises on any of them.
        """
        if part in self.left_out:
            return []
        results, failure = [], None
        for given in inputs:
            try:
                results.append(action(given))
            except GradwatchError:
                raise
            except Exception as error:  # of any kind: the training must not stop
                failure = error
        self.conclude(part, failure)
        return results

    def conclude(self, part: str, error: Exception | None, *, place: str = "", is_last: bool = False) -> None:
        """Count an attempt.

        Args:
            part: Display name of the part, such as `the batch hash`.
            error: The exception of the attempt, or None if it succeeded.
            place: Name of a place in the part. Failures in a row are counted for each place.
            is_last: Whether there is no further attempt, so that a failure leaves the part out.
        """
        place = place or part
        if error is None:
            self._failures.pop(place, None)
            return
        failures, reason = self._failures.get(place, (part, 0, ""))[1] + 1, _reason(error)
        self._failures[place] = (part, failures, reason)
        if failures >= MAX_FAILURES or is_last:
            self._leave_out(part, reason)

    def end(self) -> None:
        """Leave out each part whose newest attempt failed, since the run ends before the next attempt."""
        for part, _, reason in [*self._failures.values()]:
            self._leave_out(part, reason)

    def _leave_out(self, part: str, reason: str) -> None:
        if part in self.left_out:
            return
        self.left_out.add(part)
        text = f"{part} failed ({reason}); the rest of the run goes without"
        if part.startswith(SINK):  # each output has its own warning, since its reader misses it
            self._warn(part, text)
        else:
            self._warn(LEFT_OUT.name, f"{text}. The summary of the run lists everything that was left out.")
        if self._report:
            values = {"detector": part.startswith(DETECTOR)}
            self._report(LEFT_OUT.observe(part=part, reason=reason, values=values))

    def _warn(self, name: str, text: str) -> None:
        if name not in self.warned:
            self.warned.add(name)
            # line 0: Python would print a line of this file below the warning
            warnings.warn_explicit(f"gradwatch: {text}", RuntimeWarning, __file__, 0)


def _reason(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    is_short = text and "\n" not in text and len(text) <= MAX_REASON_LENGTH
    return f"{type(error).__name__}: {text}" if is_short else type(error).__name__
