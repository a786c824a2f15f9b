"""Open the run directory of a monitor: a new run, an existing run to continue, or one to replace."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import final

from gradwatch.errors import RunError
from gradwatch.history.disk.claim import claim_free, clear, refuse_trained
from gradwatch.history.disk.header import NAME, Header
from gradwatch.history.disk.lock import Lock
from gradwatch.history.disk.ranks import name_of
from gradwatch.history.disk.run_summary import count_steps
from gradwatch.history.disk.writer import Writer
from gradwatch.history.store import History
from gradwatch.monitor.setup.best_effort_writer import BestEffortWriter
from gradwatch.records import LayerInfo, RunInfo


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRun:
    """A run that a monitor records.

    Args:
        history: The history, with the steps so far.
        directory: The run directory, or None if the history is only in memory.
        writer: Writes the history to the directory, or None.
        first_step: Step that is recorded next.
        is_continued: Whether the history has earlier steps.
    """

    history: History
    directory: Path | None = None
    writer: BestEffortWriter | None = None
    first_step: int = 0
    is_continued: bool = False


def open_run(
    directory: Path | None, info: RunInfo, *, groups: int, resume: bool | int = False, overwrite: bool = False
) -> OpenRun:
    """Open a run directory, and say on stderr if it is not simply the given one.

    Args:
        directory: The directory of the user; None keeps the history in memory.
        info: Description of the run.
        groups: Number of optimizer groups.
        resume: Whether to continue the run in the directory. A number is the next step: later steps are deleted.
        overwrite: Whether to replace the run in the directory.

    Raises:
        RunError: The directory cannot be used, or its run does not fit.
    """
    first_step = 0 if isinstance(resume, bool) else resume
    if directory is None:
        return OpenRun(history=History(info, groups=groups), first_step=first_step)
    if resume is not False:
        return _resume(directory, info, groups=groups, next_step=None if resume is True else resume)
    if overwrite:
        return _begin(directory, info, groups=groups, held_lock=clear(directory))
    return _begin(claim_free(directory), info, groups=groups)


def _begin(
    directory: Path, info: RunInfo, *, groups: int, first_step: int = 0, held_lock: Lock | None = None
) -> OpenRun:
    """Begin a new run in a claimed directory."""
    history = History(replace(info, name=name_of(directory, info.rank)), groups=groups)
    writer = Writer(directory, history, held_lock=held_lock)
    recorder = BestEffortWriter(writer, directory=directory, history=history)
    return OpenRun(history=history, directory=directory, writer=recorder, first_step=first_step)


def _resume(directory: Path, info: RunInfo, *, groups: int, next_step: int | None) -> OpenRun:
    """Continue the run in a directory, or begin it if there is none."""
    if not (directory / NAME).exists():
        _say(f"{directory} has no run to resume; a new one begins at step {next_step or 0:,}")
        return _begin(directory, info, groups=groups, first_step=next_step or 0, held_lock=clear(directory))
    header = Header.read(directory)
    refuse_trained(directory, header)
    _check_layout(directory, header, info, groups=groups)
    num_steps = count_steps(directory, header)
    first_step = num_steps if next_step is None else next_step
    if not min(num_steps, first_step):  # no step is kept, so the run begins again
        opened = _begin(directory, info, groups=groups, first_step=first_step, held_lock=clear(directory))
    else:
        opened = _continue(directory, header, info, first_step=first_step)
    note = ""
    if first_step < num_steps:
        note = f"; steps {first_step:,} to {num_steps - 1:,} were deleted"
    elif first_step > num_steps:  # a killed process loses the rows of its last second, but not its checkpoint
        note = f"; steps {num_steps:,} to {first_step - 1:,} were not recorded"
    _say(f"{directory} continues at step {first_step:,}{note}")
    return opened


def _continue(directory: Path, header: Header, info: RunInfo, *, first_step: int) -> OpenRun:
    """Continue a run that has at least one step before `first_step`."""
    writer, history = Writer.resume(directory, first_step - 1)
    # the columns of the activations are fixed, and `versions` names the version that wrote the statistics
    then = header.info
    history.info = replace(
        info,
        name=name_of(directory, info.rank),
        created=then.created,
        activations=then.activations,
        versions=then.versions,
    )
    recorder = BestEffortWriter(writer, directory=directory, history=history)
    recorder.rewrite_header()
    return OpenRun(history=history, directory=directory, writer=recorder, first_step=first_step, is_continued=True)


def _check_layout(directory: Path, header: Header, info: RunInfo, *, groups: int) -> None:
    """Check that the rows of a model and its optimizers fit a run.

    Raises:
        RunError: They do not fit. The message names the first difference.
    """
    difference = next(_differences(header, info, groups=groups), None)
    if difference:
        raise RunError(
            f"resume: {directory} is the run of another model or optimizer: {difference}. Build both as in that run, "
            "or leave resume out to begin another run"
        )


def _differences(header: Header, info: RunInfo, *, groups: int) -> Iterator[str]:
    for number, (then, now) in enumerate(zip_longest(header.info.layers, info.layers), start=1):
        if then is None or now is None or (then.name, then.shape) != (now.name, now.shape):
            yield f"parameter {number} was {_shown(then)} and is {_shown(now)}"
        elif then.group != now.group:
            yield f"parameter '{now.name}' was in {_shown_group(then)} and is in {_shown_group(now)}"
    if header.groups != groups:
        yield f"the number of optimizer groups was {header.groups} and is {groups}"
    for activation in info.activations:
        if activation not in header.info.activations:
            then_type = {a.name: a.module_type for a in header.info.activations}.get(activation.name, "not watched")
            yield f"activation '{activation.name}' was {then_type} and is {activation.module_type}"


def _shown(layer: LayerInfo | None) -> str:
    if layer is None:
        return "missing"
    return f"'{layer.name}' ({'x'.join(map(str, layer.shape)) or 'scalar'})"


def _shown_group(layer: LayerInfo) -> str:
    return "no optimizer" if layer.group is None else f"optimizer group {layer.group}"


def _say(text: str) -> None:
    sys.stderr.write(f"gradwatch: {text}\n")
