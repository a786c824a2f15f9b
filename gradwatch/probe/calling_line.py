"""Find the frames of the user's own code on the stack, and the lines they are at."""

from __future__ import annotations

import functools
import linecache
import sys
from collections.abc import Iterator
from types import FrameType
from typing import NamedTuple

from gradwatch.errors import is_users, shown_path

MAX_CODE = 60
"""Maximum number of characters to show of a line."""

_is_users = functools.cache(is_users)


class Line(NamedTuple):
    """A line of the user's code."""

    file: str
    number: int

    def __str__(self) -> str:
        code = linecache.getline(self.file, self.number).strip()
        place = f"{shown_path(self.file)}:{self.number}"
        code = code if len(code) <= MAX_CODE else f"{code[: MAX_CODE - 4]} ..."
        return f"{place}: `{code}`" if code else place


def users_frames() -> Iterator[FrameType]:
    """Yield the frames of the user's code on the stack of this thread, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _is_users(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def calling_line() -> Line | None:
    """Return the innermost line of the user's code on the stack, or None."""
    frame = next(users_frames(), None)
    return None if frame is None else Line(frame.f_code.co_filename, frame.f_lineno)
