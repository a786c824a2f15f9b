"""Write results to standard output, and errors and warnings to standard error."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import IO, Any, Literal, TextIO

from rich.console import Console
from rich.text import Text

from gradwatch.errors import is_users, shown_path

_STYLES = {"error": "bold bright_red", "warning": "bold yellow", "note": "bold"}


class PipeConsole(Console):
    """A console that stops writing after its reader has closed the pipe, as in `gradwatch list models | head`."""

    def on_broken_pipe(self) -> None:
        """Continue without writing; rich would end the process with code 1, which means findings here."""
        _send_nowhere(self.file)


def output() -> Console:
    """Return the console for results that people read."""
    return PipeConsole()


def write(text: str) -> None:
    """Write a result without wrapping its lines."""
    _write(sys.stdout, text)


def write_json(data: Any) -> None:
    """Write a result as JSON."""
    import json

    write(json.dumps(data, indent=1) + "\n")


def print_message(kind: Literal["error", "warning", "note"], text: str | Text) -> None:
    """Write a message to standard error without wrapping its lines, so that they can be searched."""
    console = Console(stderr=True)
    with contextlib.suppress(OSError):  # if standard error cannot be written either, nothing can show the message
        with console.capture() as captured:
            console.print(Text.assemble((f"{kind}: ", _STYLES[kind]), text), soft_wrap=True)
        # not through the console, which would write into the middle of a live view
        _write(sys.stderr, captured.get())


def show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Show a Python warning on one line, with its location if the user's own code raised it."""
    text = " ".join(str(message).split()).removeprefix("gradwatch: ")
    place = f" ({shown_path(filename)}, line {lineno})" if is_users(filename) else ""
    print_message("warning", text + place)


def output_error(*, after: OSError | None = None) -> str:
    """Return why standard output cannot be written, such as a full disk, or an empty string.

    Afterwards, nothing more is written to an output that failed.

    Args:
        after: Error that the output may have caused. A line break is written to find out.
    """
    try:
        if sys.stdout:  # None if the caller has closed it
            sys.stdout.flush()  # a part may still be in the buffer
        # an error about a named file is not about the output
        if sys.stdout and after and after.filename is None:
            os.write(sys.stdout.fileno(), b"\n")
    except io.UnsupportedOperation:  # an output in memory has no descriptor
        return ""
    except OSError as error:
        _send_nowhere(sys.stdout)
        return "" if isinstance(error, BrokenPipeError) else str(error.strerror)
    return ""


def _write(stream: TextIO | None, text: str) -> None:
    if stream is None:
        return
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:  # as in `gradwatch runs | head`
        _send_nowhere(stream)


def _send_nowhere(stream: IO[str]) -> None:
    # at the level of the file descriptor: Python flushes the stream again at exit, which would fail
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
