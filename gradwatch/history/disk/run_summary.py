"""Summarize a run from its header and the ends of its files alone: health, steps, final metrics and findings."""

# T = records of a file

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Literal, final

import numpy as np
from numpy.typing import NDArray

from gradwatch.errors import RunError
from gradwatch.history.disk.findings import FINDINGS
from gradwatch.history.disk.header import FORMAT, NAME, Status
from gradwatch.history.disk.segments import SUFFIX, Layout
from gradwatch.records import Severity

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # not on Windows: there, a killed run cannot be told from one that goes on
    fcntl = None

DEPTH = 3
"""Folders below the named one that are searched for runs: `runs/sweep/first/`."""
FINAL = ("loss", "val_loss", "val_accuracy")
_HELD = ("history", "config.yaml", FINDINGS.name)
"""What a run directory holds besides its header: one of them without a header is a damaged run."""

Ending = Status | Literal["killed"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """What a list of runs shows of one.

    Args:
        path: Its directory.
        name: Its name.
        created: When it began, with time zone.
        status: How it ended; `killed` where it says `running` and no process writes to it.
        steps: Optimizer steps done.
        total_steps: Planned ones, or None where nobody knew.
        loss: Training loss at the newest step; nan where it was not finite or there is none.
        val_loss: Newest validation loss, else nan.
        val_accuracy: Newest validation accuracy, 0..1, else nan.
        found: The gravest severity of each kind of finding, the gravest kinds first.
    """

    path: Path
    name: str
    created: datetime.datetime
    status: Ending
    steps: int
    total_steps: int | None
    loss: float
    val_loss: float
    val_accuracy: float
    found: dict[str, Severity]

    @property
    def worst_severity(self) -> Severity | None:
        """The gravest finding above info; None is healthy, where there are steps at all."""
        worst = max(self.found.values(), default=Severity.INFO)
        return worst if worst > Severity.INFO else None


def directories(folder: Path) -> Iterator[Path]:
    """Yield the run directories in a folder or, where it is one itself, that: whole ones and damaged ones."""
    yield from _directories(str(folder), DEPTH)


def summarize(directory: Path) -> RunSummary:
    """Read what a list shows of a run.

    Raises:
        RunError: It is damaged, with what is.
    """
    try:
        return _read(directory)
    except RunError:
        raise
    except KeyError as error:
        raise RunError(f"{directory / NAME}: {error} is missing") from error
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise RunError(f"{directory}: {error}") from error


def _directories(folder: str, depth: int) -> Iterator[Path]:
    with os.scandir(folder) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    names = {entry.name for entry in found}
    if NAME in names or names.intersection(_HELD):
        yield Path(folder)
    elif depth:
        for entry in found:
            if entry.is_dir() and not entry.name.startswith("."):
                yield from _directories(entry.path, depth - 1)


def _read(directory: Path) -> RunSummary:
    if not (directory / NAME).is_file():
        raise RunError(f"{directory}: it holds no {NAME}")
    header = json.loads((directory / NAME).read_bytes())
    if int(header["format"]) > FORMAT:
        raise RunError(f"{directory}: format {header['format']} is newer than this gradwatch reads ({FORMAT})")
    info = header["info"]
    created = datetime.datetime.fromisoformat(info["created"])
    steps, final = _newest(directory / "history" / "steps", Layout.from_json(header["records"]["steps"]))
    status = header["status"]
    if status == "running" and not _is_held(directory / "history" / "lock"):
        status = "killed"
    return RunSummary(
        path=directory,
        name=str(info["name"]),
        created=created if created.tzinfo else created.replace(tzinfo=datetime.UTC),
        status=status,
        steps=steps,
        total_steps=info["total_steps"],
        found=_found(directory),
        **final,
    )


def _newest(folder: Path, layout: Layout) -> tuple[int, dict[str, float]]:
    """Return the number of steps, and the newest known value of each final metric; nan where there is none."""
    final = dict.fromkeys(FINAL, float("nan"))
    wanted = {name: layout.fields["run"].statistics.index(name) for name in FINAL}
    steps = 0
    for path in sorted((p for p in folder.iterdir() if p.suffix == SUFFIX), reverse=True):
        records_T = _records(path, layout)
        if not len(records_T):
            continue
        values_TS = records_T["run"][:, :, 0]
        if not steps:
            steps, final["loss"] = int(records_T["step"][-1]) + 1, float(values_TS[-1, wanted.pop("loss")])
        for name, column in tuple(wanted.items()):
            known_T = np.flatnonzero(~np.isnan(values_TS[:, column]))
            if known_T.size:
                final[name] = float(values_TS[known_T[-1], wanted.pop(name)])
        if not wanted or "val_loss" not in wanted:  # where it is measured, so is the accuracy, if there is one
            break
    return steps, final


def _records(path: Path, layout: Layout) -> NDArray[np.void]:
    """Return the whole records of a file. It is mapped rather than read: little of each is touched."""
    record = layout.record
    count = path.stat().st_size // record.itemsize
    return np.memmap(path, record, mode="r", shape=(count,)) if count else np.empty(0, record)


def _found(directory: Path) -> dict[str, Severity]:
    path = directory / FINDINGS.name
    if not path.exists() or not path.stat().st_size:
        return {}
    worst: dict[str, Severity] = {}
    known, problems = FINDINGS.read(directory)
    if problems:
        raise RunError("; ".join(problems))
    for finding in known:
        worst[finding.kind] = max(finding.severity, worst.get(finding.kind, finding.severity))
    return dict(sorted(worst.items(), key=lambda item: -item[1]))


def _is_held(lock: Path) -> bool:
    """Say whether another process is writing to a run; taken for granted where there is no way to know."""
    if fcntl is None:
        return True
    try:
        file = os.open(lock, os.O_RDWR)
    except OSError:
        return True
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(file)
    return False
