"""Read and write segment files: raw little-endian records of a step and its values in some tables."""

# T = recorded steps, L = layers of a table, S = statistics

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self, final

import numpy as np
from numpy.typing import NDArray

from gradwatch.history.disk import atomic
from gradwatch.history.table import Steps, Table
from gradwatch.history.thinning import is_among

SUFFIX = ".bin"
INCOMPLETE = -1
"""Marks a file with an incomplete last record. No number of rows is equal to it, so the file is always rewritten."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """The values of one table in a record, of shape (S, L).

    Args:
        statistics: Names of the S statistics.
        layers: Number of layers L.
        dtype: Type of the values, such as `<f4`.
    """

    statistics: tuple[str, ...]
    layers: int
    dtype: str

    def __post_init__(self) -> None:
        np.dtype(self.dtype)  # raises TypeError if the dtype does not exist


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The layout of a record: the step as int64, then the values of each table.

    Args:
        segment_length: Number of steps in a file.
        fields: Values of each table by its name, in the order of the record.
    """

    segment_length: int
    fields: dict[str, Field]

    @classmethod
    def of(cls, tables: Mapping[str, Table]) -> Self:
        """Return the layout of tables in the format of this version. All tables must have equal steps."""
        lengths = {table.segment_length for table in tables.values()}
        assert len(lengths) == 1, "tables that share records share their segments"
        fields = {
            name: Field(statistics=table.statistics, layers=len(table.layers), dtype=table.dtype.newbyteorder("<").str)
            for name, table in tables.items()
        }
        return cls(segment_length=lengths.pop(), fields=fields)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Return the layout from the result of `to_json`."""
        fields = {name: Field(**f | {"statistics": tuple(f["statistics"])}) for name, f in data["fields"].items()}
        length = int(data["segment_length"])
        if length < 1:
            raise ValueError(f"segment_length is {length}, expected 1 or more")
        return cls(segment_length=length, fields=fields)

    def to_json(self) -> dict[str, Any]:
        """Return plain data that `from_json` reads back."""
        return asdict(self)

    @property
    def record(self) -> np.dtype[np.void]:
        """The dtype of a record."""
        values = [(name, f.dtype, (len(f.statistics), f.layers)) for name, f in self.fields.items()]
        return np.dtype([("step", "<i8"), *values])


@final
class SegmentWriter:
    """Writes growing tables to segment files. Rows are passed to the kernel at once, so that a kill loses none.

    Args:
        folder: Folder of the files, created if it is missing.
        tables: Tables by name, all with equal steps.
    """

    def __init__(self, folder: Path, tables: Mapping[str, Table]) -> None:
        self._folder = folder
        self._names = tuple(tables)
        self._tables = tuple(tables.values())
        self._layout = Layout.of(tables)
        self._record = self._layout.record
        self._num_rows: dict[int, int] = {}
        self._file = -1
        self._path = folder
        self._segment = -1
        self._written_step = self._tables[0].last_step
        atomic.make_folder(folder)
        self._repair()

    def append(self) -> None:
        """Write the rows that are not on disk yet. They must have been in the windows before the last append."""
        length = self._layout.segment_length
        # one round per segment, since a file ends with its segment
        while self._written_step < self._tables[0].last_step:
            steps_T, _ = self._tables[0].since(self._written_step)
            segment = int(steps_T[0]) // length
            if segment != self._segment:
                self._start_segment(segment)
            count = int(np.searchsorted(steps_T, (segment + 1) * length))
            records_T = np.empty(count, self._record)
            records_T["step"] = steps_T[:count]
            for name, table in zip(self._names, self._tables, strict=True):
                records_T[name] = table.since(self._written_step)[1][:count]
            # counted, not read from the file: the length to restore if the disk is full
            size = self._num_rows[segment] * self._record.itemsize
            atomic.append(self._file, records_T.tobytes(), path=self._path, size=size)
            self._num_rows[segment] += count
            self._written_step = int(steps_T[count - 1])

    def close(self) -> None:
        """Close the open file."""
        if self._file >= 0:
            os.close(self._file)
        self._file = self._segment = -1

    def _repair(self) -> None:
        """Rewrite existing files so that they contain exactly the kept rows of the tables."""
        # left by a process that was killed in `atomic.replace`
        for unfinished in self._folder.glob("*.tmp"):
            unfinished.unlink()
        for index, path in _segments(self._folder, self._layout.segment_length).items():
            num_rows, num_extra_bytes = divmod(path.stat().st_size, self._record.itemsize)
            self._num_rows[index] = INCOMPLETE if num_extra_bytes else num_rows
        self._thin(except_for=-1)

    def _start_segment(self, segment: int) -> None:
        """Open the file of a new segment, and thin the files of older segments."""
        self.close()
        self._thin(except_for=segment)
        self._path = self._name(segment)
        self._file = atomic.open_at_end(self._path)
        self._num_rows.setdefault(segment, 0)
        self._segment = segment

    def _thin(self, *, except_for: int) -> None:
        """Rewrite the segments that do not have as many rows as the tables keep."""
        kept_T = self._tables[0].kept_steps()
        indices, counts = np.unique(kept_T // self._layout.segment_length, return_counts=True)
        wanted = dict(zip(indices.tolist(), counts.tolist(), strict=True))
        # newest first: a kill in between must leave no gap before rows that are still to be deleted
        for index in sorted((self._num_rows.keys() | wanted.keys()) - {except_for}, reverse=True):
            if self._num_rows.get(index, 0) != wanted.get(index, 0):
                self._rewrite(index, kept_T)

    def _rewrite(self, index: int, kept_T: Steps) -> None:
        """Rewrite a segment with its kept steps."""
        # a table may hold further steps of the segment, so each has its own mask
        steps_T = self._tables[0].segment(index)[0]
        steps_T = steps_T[is_among(steps_T, kept_T)]
        if not len(steps_T):
            self._name(index).unlink(missing_ok=True)
            self._num_rows.pop(index, None)
            return
        records_T = np.empty(len(steps_T), self._record)
        records_T["step"] = steps_T
        for name, table in zip(self._names, self._tables, strict=True):
            table_steps_T, values_TSL = table.segment(index)
            records_T[name] = values_TSL[is_among(table_steps_T, steps_T)]
        atomic.replace(self._name(index), records_T.tobytes())
        self._num_rows[index] = len(records_T)

    def _name(self, index: int) -> Path:
        return self._folder / f"{index * self._layout.segment_length:012d}{SUFFIX}"


def read(folder: Path, layout: Layout) -> tuple[list[NDArray[np.void]], list[str]]:
    """Read all segments in a folder. An incomplete last record of a killed writer is ignored.

    Returns:
        Records by segment, in order of their steps, and a sentence about each damaged file.
    """
    parts: list[NDArray[np.void]] = []
    problems: list[str] = []
    segments = sorted(_segments(folder, layout.segment_length).items())
    for index, path in segments:
        try:
            data = path.read_bytes()
        except FileNotFoundError:  # thinned by a live run a moment ago
            continue
        except OSError as error:
            problems.append(f"{path} cannot be read: {error.strerror}")
            continue
        num_records, num_extra_bytes = divmod(len(data), layout.record.itemsize)
        records_T = np.frombuffer(data, layout.record, count=num_records)
        is_valid_T = _is_in_order(records_T["step"], index, layout.segment_length)
        if not is_valid_T.all():
            problems.append(f"{path}: {int((~is_valid_T).sum())} of {num_records} records are damaged")
        # a killed writer leaves an incomplete record only in the newest file
        if num_extra_bytes and index != segments[-1][0]:
            problems.append(f"{path} is cut short")
        parts.append(records_T if is_valid_T.all() else records_T[is_valid_T])
    return parts, problems


def read_since(folder: Path, layout: Layout, step: int) -> list[NDArray[np.void]]:
    """Return the records after a step, by segment. Files that cannot be read, or are damaged, have no records."""
    parts: list[NDArray[np.void]] = []
    for index, path in sorted(_segments(folder, layout.segment_length).items()):
        if (index + 1) * layout.segment_length <= step + 1:  # all of its steps are older
            continue
        try:
            data = path.read_bytes()
        except OSError:
            continue
        records_T = np.frombuffer(data, layout.record, count=len(data) // layout.record.itemsize)
        is_valid_T = _is_in_order(records_T["step"], index, layout.segment_length)
        parts.append(records_T[is_valid_T & (records_T["step"] > step)])
    return parts


def fill(table: Table, parts: list[NDArray[np.void]], *, name: str, layout: Layout) -> None:
    """Fill an empty table with records. Statistics that the records lack become nan.

    Args:
        table: The table, with as many layers as the records.
        parts: Records in order of their steps.
        name: Name of the table in the records.
        layout: Layout of the records.
    """
    recorded = layout.fields[name].statistics
    steps_T = np.concatenate([np.empty(0, "<i8"), *(part["step"] for part in parts)])
    values_TSL = np.empty((len(steps_T), *table.shape), table.dtype)
    if recorded == table.statistics:  # in one piece, without a temporary array
        np.concatenate([values_TSL[:0], *(part[name] for part in parts)], out=values_TSL)
    else:
        values_TSL.fill(np.nan)
        for i in (i for i, statistic in enumerate(table.statistics) if statistic in recorded):
            column = recorded.index(table.statistics[i])
            np.concatenate([values_TSL[:0, i], *(p[name][:, column] for p in parts)], out=values_TSL[:, i])
    table.fill(steps_T, values_TSL)


def _segments(folder: Path, length: int) -> dict[int, Path]:
    """Return the segment files in a folder by the index of their segment."""
    return {int(p.stem) // length: p for p in folder.glob(f"*{SUFFIX}") if p.stem.isdecimal()}


def _is_in_order(steps_T: Steps, index: int, length: int) -> NDArray[np.bool_]:
    """Return a mask of the steps that belong to the segment and are greater than all valid steps before them."""
    is_valid_T: NDArray[np.bool_] = steps_T // length == index
    largest_T = np.maximum.accumulate(np.where(is_valid_T, steps_T, -1))
    is_valid_T[1:] &= steps_T[1:] > largest_T[:-1]
    return is_valid_T
