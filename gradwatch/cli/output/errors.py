"""Show why a command ended: a mistake as a message, an exception in the user's own code with its traceback."""

from __future__ import annotations

import sys
import traceback
from traceback import FrameSummary, TracebackException

from gradwatch.cli.output.console import print_message
from gradwatch.cli.output.problems import shown_problem
from gradwatch.errors import PACKAGE, ConfigError, GradwatchError, is_users, raised

BETWEEN = ("torch/nn/modules/module.py", "torch/_dynamo/eval_frame.py", "torch/utils/_contextlib.py")
"""Files of torch that only pass on calls; a traceback has several of their frames per module."""


def print_mistake(error: GradwatchError) -> None:
    """Show a mistake that the user can fix and its notes; for a config, show each problem with its line."""
    problems = error.problems if isinstance(error, ConfigError) else ()
    for problem in problems:
        print_message("error", shown_problem(problem).append("\n" if len(problems) > 1 else ""))
    if len(problems) > 1:
        print_message("error", f"{len(problems)} problems in the config")
    elif not problems:
        print_message("error", str(error))
    show_notes(error)


def print_crash(error: Exception) -> None:
    """Show an unexpected exception, and say whose code raised it.

    The traceback begins in the user's own code, if the exception passed through it.
    """
    notes = getattr(error, "__notes__", [])
    trace = TracebackException.from_exception(error)
    trace.__notes__ = None  # printed below, each on its own line
    part: TracebackException | None = trace
    while part:
        part.stack[:] = _relevant_frames(part.stack)
        part = part.__cause__ or part.__context__  # the chained exceptions are formatted too
    sys.stderr.write("".join(trace.format()))
    for note in notes:
        print_message("note", note)
    print_message("error", _blamed(error))


def _blamed(error: Exception) -> str:
    text = " ".join(raised(error).split())
    if any(is_users(frame.filename) for frame in traceback.extract_tb(error.__traceback__)):
        return f"your own code raised {text}"
    return f"unexpected {text}; the traceback says where. If gradwatch is at fault, please report it"


def show_notes(error: BaseException) -> None:
    """Show the notes that were added to an exception."""
    for note in getattr(error, "__notes__", []):
        print_message("note", note)


def _relevant_frames(stack: traceback.StackSummary) -> list[FrameSummary]:
    """Return the frames from the user's first frame to the end; without one, all frames below the CLI."""
    ours = str(PACKAGE / "cli")
    first = next((i for i, f in enumerate(stack) if is_users(f.filename)), None)
    if first is None:
        first = max((i + 1 for i, f in enumerate(stack) if f.filename.startswith(ours)), default=0)
    # never empty: an exception inside such a file alone keeps its frames
    return [f for f in stack[first:] if not f.filename.endswith(BETWEEN)] or list(stack)
