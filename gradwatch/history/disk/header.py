"""Read and write run.json: the description of a run, the layout of its records, and its status."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, final, get_args

from gradwatch.errors import RunError, did_you_mean
from gradwatch.history.disk import atomic
from gradwatch.history.disk.segments import Layout
from gradwatch.history.ending import Ending, Status
from gradwatch.history.store import History
from gradwatch.history.table import Table
from gradwatch.records import RunInfo

FORMAT = 2  # 2: the run info has the data and the steps per epoch
"""Version of the format. Every change that an older gradwatch cannot read increases it."""
NAME = "run.json"
SHARED = {"steps": ("run", "param"), "samples": ("act",)}
"""Tables that share records, by folder: a record per step, or a record per step that sampled activations."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The content of run.json.

    Args:
        ending: How the run ended, or `running` if the run is active or its process was killed.
        groups: Number of optimizer groups.
        layouts: Layout of the records by folder.
        info: Description of the run.
    """

    ending: Ending
    groups: int
    layouts: dict[str, Layout]
    info: RunInfo

    @classmethod
    def of(cls, history: History, status: Status) -> Self:
        """Return the header of a history, in the format of this version.

        Args:
            history: The history. Its ending counts if it has the status.
            status: Status of the run.
        """
        ending = history.ending
        if ending is None or ending.status != status:
            ending = Ending(kind=status)
        layouts = {folder: Layout.of(tables) for folder, tables in shared_tables(history).items()}
        return cls(ending=ending, groups=history.groups, layouts=layouts, info=history.info)

    def write(self, directory: Path) -> None:
        """Write the header atomically."""
        data = {
            "format": FORMAT,
            "status": self.ending.status,
            "ending": self.ending.to_json(),
            "groups": self.groups,
            "records": {folder: layout.to_json() for folder, layout in self.layouts.items()},
            "info": self.info.to_json(),
        }
        # atomic, since other processes may read the header while the run is active
        atomic.replace(directory / NAME, json.dumps(data, indent=1).encode())

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Read the header of a run directory.

        Raises:
            RunError: There is no run, or this version cannot read it.
        """
        path = _find(directory)
        try:
            data = json.loads(path.read_bytes())
            # before the rest, which a newer format may have changed
            if int(data["format"]) > FORMAT:
                raise RunError(
                    f"{path}: format {data['format']} is newer than this gradwatch reads ({FORMAT}): update gradwatch"
                )
            return cls._from_json(data)
        except RunError:  # a newer format is not damage
            raise
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise RunError(f"{path} is damaged, so the run cannot be read: {_reason(error)}") from error

    @classmethod
    def _from_json(cls, data: dict[str, Any]) -> Self:
        if data["status"] not in get_args(Status):
            raise ValueError(f"status is {data['status']!r}, expected one of {', '.join(get_args(Status))}")
        info = RunInfo.from_json(data["info"])
        layouts = {folder: Layout.from_json(data["records"][folder]) for folder in SHARED}
        rows = {"run": 1, "param": len(info.layers), "act": len(info.activations)}
        # checked here, since records of another shape would be read as wrong numbers
        for layout in layouts.values():
            for name, values in layout.fields.items():
                if values.layers != rows[name]:
                    raise ValueError(f"records of '{name}' have {values.layers} layers, the run has {rows[name]}")
        ending = Ending.from_json(data.get("ending"), status=data["status"])
        return cls(ending=ending, groups=int(data["groups"]), layouts=layouts, info=info)


def shared_tables(history: History) -> dict[str, dict[str, Table]]:
    """Return the tables of a history by folder and name."""
    return {folder: {name: getattr(history, name) for name in names} for folder, names in SHARED.items()}


def _find(directory: Path) -> Path:
    """Return the path of run.json, or raise an error that suggests similar names and runs in the directory."""
    # a missing directory is often a typo, and a folder of runs is often given instead of a run
    if not directory.exists():
        near = did_you_mean(directory.name, (p.name for p in _folders(directory.parent)))
        raise RunError(f"{directory}: there is no such run directory{near}")
    if (directory / NAME).is_file():
        return directory / NAME
    runs = sorted(p for p in _folders(directory) if (p / NAME).is_file())
    inside = f"; it contains runs, the last of them {runs[-1]}" if runs else ""
    raise RunError(f"{directory} is not a run directory: it has no {NAME}{inside}")


def _folders(directory: Path) -> list[Path]:
    return [p for p in directory.iterdir() if p.is_dir()] if directory.is_dir() else []


def _reason(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)
