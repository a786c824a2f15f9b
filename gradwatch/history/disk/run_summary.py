"""Summarize a run for a list, from its header and the ends of its files: status, steps, metrics and findings."""

# T = records of a file

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
from numpy.typing import NDArray

from gradwatch.errors import RunError
from gradwatch.history.disk import lock
from gradwatch.history.disk.findings import FINDINGS, open_findings
from gradwatch.history.disk.header import NAME, Header
from gradwatch.history.disk.segments import SUFFIX, Layout
from gradwatch.history.ending import Ending
from gradwatch.paths import RUN_CONFIG
from gradwatch.records import Severity

MAX_DEPTH = 3
"""Number of folder levels that are searched for runs, such as `runs/sweep/first/`."""
FINAL = ("loss", "val_loss", "val_accuracy")
"""Metrics in a list of runs, each with its newest value."""
RUN_FILES = ("history", RUN_CONFIG, FINDINGS.name)
"""Other contents of a run directory. A folder with one of them but without a header is a damaged run."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """The entry of one run in a list of runs.

    Args:
        path: Run directory.
        name: Name of the run.
        created: Start of the run, with time zone.
        ending: How the run ended; `killed` if its header says `running` and no process writes to it.
        steps: Optimizer steps done.
        total_steps: Planned optimizer steps, or None if unknown.
        world_size: Number of ranks of the training.
        loss: Training loss at the newest step; nan if it was not finite or there is no step.
        val_loss: Newest validation loss, or nan.
        val_accuracy: Newest validation accuracy, 0..1, or nan.
        found: Highest severity of each kind of finding, the most severe kinds first.
    """

    path: Path
    name: str
    created: datetime.datetime
    ending: Ending
    steps: int
    total_steps: int | None
    world_size: int
    loss: float
    val_loss: float
    val_accuracy: float
    found: dict[str, Severity]

    @property
    def status(self) -> str:
        """`finished`, `interrupted`, `failed`, `running` or `killed`."""
        return "killed" if self.ending.kind == "killed" else self.ending.status

    @property
    def worst_severity(self) -> Severity | None:
        """Highest severity of the findings, or None if no finding is above info."""
        worst = max(self.found.values(), default=Severity.INFO)
        return worst if worst > Severity.INFO else None


def directories(folder: Path) -> Iterator[Path]:
    """Yield the run directories in a folder, including damaged ones. A run directory yields itself."""
    yield from _directories(str(folder), MAX_DEPTH)


def summarize(directory: Path) -> RunSummary:
    """Return the summary of a run.

    Raises:
        RunError: The run is damaged. The message names the damage.
    """
    if not (directory / NAME).is_file():
        raise RunError(f"{directory}: it holds no {NAME}")
    header = Header.read(directory)
    info = header.info
    try:
        created = datetime.datetime.fromisoformat(info.created)
        steps, final = _newest(directory / "history" / "steps", header.layouts["steps"])
    except (OSError, ValueError) as error:
        raise RunError(f"{directory}: {error}") from error
    return RunSummary(
        path=directory,
        name=info.name,
        # times with and without a zone cannot be sorted together
        created=created if created.tzinfo else created.replace(tzinfo=datetime.UTC),
        ending=_ending(directory, header),
        steps=steps,
        total_steps=info.total_steps,
        world_size=info.world_size,
        found=_worst_severities(directory),
        **final,
    )


def count_steps(directory: Path, header: Header) -> int:
    """Return the number of optimizer steps of a run, which is the step after its newest one.

    Raises:
        RunError: The rows of the run cannot be read.
    """
    try:
        return _newest(directory / "history" / "steps", header.layouts["steps"])[0]
    except (OSError, ValueError) as error:
        raise RunError(f"{directory}: {error}") from error


def ending_of(directory: Path) -> Ending:
    """Return how a run ended; `killed` if it has no ending of its own and no process writes to it.

    Call it only in a process that does not write to the run: it would release the lock of that process.

    Raises:
        RunError: There is no run, or its header cannot be read.
    """
    return _ending(directory, Header.read(directory))


def _ending(directory: Path, header: Header) -> Ending:
    if header.ending.kind == "running" and not lock.is_held(directory):
        return Ending(kind="killed")
    return header.ending


def _directories(folder: str, depth: int) -> Iterator[Path]:
    with os.scandir(folder) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    names = {entry.name for entry in found}
    if NAME in names or names.intersection(RUN_FILES):
        yield Path(folder)
    elif depth:
        for entry in found:
            if entry.is_dir() and not entry.name.startswith("."):
                yield from _directories(entry.path, depth - 1)


def _newest(folder: Path, layout: Layout) -> tuple[int, dict[str, float]]:
    """Return the number of steps, and the newest value of each final metric or nan."""
    # from the newest file back, until all metrics are known
    final = dict.fromkeys(FINAL, float("nan"))
    wanted = {name: layout.fields["run"].statistics.index(name) for name in FINAL}
    steps = 0
    for path in sorted((p for p in folder.iterdir() if p.suffix == SUFFIX), reverse=True):
        records_T = _records(path, layout)
        if not len(records_T):  # the writer opens a file before its first record
            continue
        values_TS = records_T["run"][:, :, 0]
        if not steps:  # the newest file; a loss of nan is its value, while a validation is missing at most steps
            steps, final["loss"] = int(records_T["step"][-1]) + 1, float(values_TS[-1, wanted.pop("loss")])
        for name, column in tuple(wanted.items()):
            known_T = np.flatnonzero(~np.isnan(values_TS[:, column]))
            if known_T.size:
                final[name] = float(values_TS[known_T[-1], wanted.pop(name)])
        if "val_loss" not in wanted:  # a validation that measures an accuracy measures a loss as well
            break
    return steps, final


def _records(path: Path, layout: Layout) -> NDArray[np.void]:
    record = layout.record
    # complete records only; mapped, since only a few columns are read; an empty file cannot be mapped
    count = path.stat().st_size // record.itemsize
    return np.memmap(path, record, mode="r", shape=(count,)) if count else np.empty(0, record)


def _worst_severities(directory: Path) -> dict[str, Severity]:
    findings, problems = FINDINGS.read(directory)
    if problems:
        raise RunError("; ".join(problems))
    worst: dict[str, Severity] = {}
    for finding in open_findings(findings):
        worst[finding.kind] = max(finding.severity, worst.get(finding.kind, finding.severity))
    return dict(sorted(worst.items(), key=lambda item: -item[1]))
