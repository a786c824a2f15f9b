"""Find the frames of the user's code on the stack, and their current lines."""

from __future__ import annotations

import functools
import inspect
import linecache
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, final

from gradwatch.errors import is_users, shown_path

MAX_CODE = 60
"""Maximum number of characters to show of a line."""

_is_users = functools.cache(is_users)


@final
@dataclass(frozen=True, slots=True)
class Place:
    """A line of source code; false if it is unknown.

    Args:
        file: Path of the file in the code object, or an empty string.
        line: Line number, from 1; or 0.
        function: Name of the function that contains the line, if it was asked for.
    """

    file: str = ""
    line: int = 0
    function: str = field(default="", compare=False)

    @property
    def text(self) -> str:
        """Return the text of the line without indentation; empty if the source is not available."""
        return linecache.getline(self.file, self.line).strip() if self.file else ""

    @property
    def with_text(self) -> str:
        """Return the file, the line number and the start of the line's text."""
        text = self.text
        text = text if len(text) <= MAX_CODE else f"{text[: MAX_CODE - 4]} ..."
        return f"{self}: `{text}`" if text else str(self)

    def __bool__(self) -> bool:
        return bool(self.file)

    def __str__(self) -> str:
        return f"{shown_path(self.file)}:{self.line}" if self.file else ""

    def to_json(self) -> dict[str, Any]:
        """Return plain data; unknown values are None."""
        return {"file": self.file or None, "line": self.line or None}


NOWHERE = Place()


def users_frames(within: CodeType | None = None) -> Iterator[FrameType]:
    """Yield the frames of the user's code on the stack of this thread, the innermost first.

    Args:
        within: Code of the frame at which to stop.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not within:
        if _is_users(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def variables_of(frame: FrameType) -> dict[str, Any]:
    """Return a copy of the variables of a frame."""
    variables = frame.f_locals
    found = dict(variables)
    # Before Python 3.13 they are a copy already, which would keep the tensors of this step until the function returns.
    # The script may hold it as well, since locals() returns the same dict. Otherwise three references exist: the frame,
    # this variable and the call.
    is_function = bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)
    if is_function and type(variables) is dict and sys.getrefcount(variables) <= 3:
        variables.clear()
    return found


def calling_place(within: CodeType | None = None) -> Place:
    """Return the innermost line of the user's code that is running, in the frames that `users_frames` yields."""
    frame = next(users_frames(within), None)
    return NOWHERE if frame is None else Place(frame.f_code.co_filename, frame.f_lineno)
