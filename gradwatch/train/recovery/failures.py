"""Handle errors that end a run: remove an empty run directory, and add notes on how to continue the others."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from gradwatch.errors import OutOfMemoryError, RunError
from gradwatch.history.disk.writer import read
from gradwatch.monitor import record_failure
from gradwatch.probe.memory.out_of_memory import is_out_of_memory, reason
from gradwatch.train import checkpoint
from gradwatch.train.session import Session

DEVICE_ASSERT = "device-side assert"


@contextlib.contextmanager
def discarded_if_empty(directory: Path) -> Iterator[None]:
    """Remove a new run's directory after an error if no step was recorded, since it cannot be continued.

    Args:
        directory: The run directory. Its files must be closed inside the context.
    """
    try:
        yield
    except BaseException:  # Ctrl-C leaves an empty directory too
        discard_if_empty(directory)
        raise


def discard_if_empty(directory: Path) -> None:
    """Remove a run directory if no step was recorded in it."""
    if not _has_steps(directory):
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def resumable(session: Session) -> Iterator[None]:
    """Add a note to an error on how to continue the run."""
    begun = session.progress.step
    try:
        yield
    except BaseException as error:
        record_failure(session.pipeline, error)
        if session.progress.step > begun:  # without a step, there is nothing new to resume or diagnose
            error.add_note(how_to_continue(session.directory, session.progress.step))
        raise


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Replace an out-of-memory error with one that names remedies, and add a note to a device-side assert."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            failure = OutOfMemoryError(
                f"out of memory: {reason(error)}; lower data.batch_size (and raise train.accumulate by as much), "
                "set train.precision: bf16 or train.activation_checkpointing: sqrt, or use a smaller model"
            )
            for note in getattr(error, "__notes__", []):
                failure.add_note(note)
            raise failure from error
        if DEVICE_ASSERT in str(error):
            error.add_note(
                "most often, a label or a token is out of range: --set train.device=cpu shows which one, and where"
            )
        raise


def how_to_continue(directory: Path, steps: int) -> str:
    """Return how far a run got, and the command that continues it."""
    reached = f"the run got to step {steps:,}"
    last = checkpoint.newest(directory / "checkpoints")
    if last is None:
        return f"{reached}, before its first checkpoint; see what was recorded with: gradwatch diagnose {directory}"
    return f"{reached}; continue from its checkpoint of step {last:,} with: gradwatch train --resume {directory}"


def _has_steps(directory: Path) -> bool:
    try:
        return read(directory).step >= 0
    except RunError:
        return False  # the error came before the first file of the history
