"""Segment files: raw little-endian records, a step and the values of some tables, named by their first step."""

# T = recorded steps, L = layers (rows of a table), S = statistics

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
TORN = -1
"""Rows of a file whose last record is not whole."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """How the values of one table lie in a record: S by L.

    Args:
        statistics: Names of the S statistics.
        layers: Number of layers.
        dtype: Type of the values, such as `<f4`.
    """

    statistics: tuple[str, ...]
    layers: int
    dtype: str

    def __post_init__(self) -> None:
        np.dtype(self.dtype)  # raises where it is none


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How records are laid out: the step as int64, then the values of each table.

    Args:
        segment_length: Steps that share a file.
        fields: Values by the name of their table, in the order of the record.
    """

    segment_length: int
    fields: dict[str, Field]

    @classmethod
    def of(cls, tables: Mapping[str, Table]) -> Self:
        """Return the layout of tables as this version writes them. They must have the same steps."""
        lengths = {table.segment_length for table in tables.values()}
        assert len(lengths) == 1, "tables that share records share their segments"
        fields = {
            name: Field(statistics=table.statistics, layers=len(table.layers), dtype=table.dtype.newbyteorder("<").str)
            for name, table in tables.items()
        }
        return cls(segment_length=lengths.pop(), fields=fields)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Return the layout that `to_json` gave."""
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
        """The record of one step."""
        values = [(name, f.dtype, (len(f.statistics), f.layers)) for name, f in self.fields.items()]
        return np.dtype([("step", "<i8"), *values])


@final
class SegmentWriter:
    """Writes tables down while they grow. What is appended goes to the kernel at once, so that a kill loses none of it.

    Args:
        folder: Where the files are; made where it is missing.
        tables: What is written, by name. All of them have the same steps.
    """

    def __init__(self, folder: Path, tables: Mapping[str, Table]) -> None:
        self._folder = folder
        self._names = tuple(tables)
        self._tables = tuple(tables.values())
        self._layout = Layout.of(tables)
        self._record = self._layout.record
        self._rows: dict[int, int] = {}
        self._file = -1
        self._path = folder
        self._segment = -1
        self._written = self._tables[0].last_step
        atomic.make_folder(folder)
        self._adopt()

    def append(self) -> None:
        """Write the rows that have not been written yet; before the last ones were laid, they were in the windows."""
        length = self._layout.segment_length
        while self._written < self._tables[0].last_step:
            steps_T, _ = self._tables[0].since(self._written)
            segment = int(steps_T[0]) // length
            if segment != self._segment:
                self._begin(segment)
            count = int(np.searchsorted(steps_T, (segment + 1) * length))
            records_T = np.empty(count, self._record)
            records_T["step"] = steps_T[:count]
            for name, table in zip(self._names, self._tables, strict=True):
                records_T[name] = table.since(self._written)[1][:count]
            rows = self._rows[segment]
            data = records_T.tobytes()
            atomic.append(self._file, data, path=self._path, size=rows * self._record.itemsize)
            self._rows[segment] = rows + count
            self._written = int(steps_T[count - 1])

    def close(self) -> None:
        """Let go of the open file."""
        if self._file >= 0:
            os.close(self._file)
        self._file = self._segment = -1

    def _adopt(self) -> None:
        """Make the files hold what the tables keep, whatever is there."""
        for unfinished in self._folder.glob("*.tmp"):
            unfinished.unlink()
        for index, path in _segments(self._folder, self._layout.segment_length).items():
            rows, torn = divmod(path.stat().st_size, self._record.itemsize)
            self._rows[index] = rows if not torn else TORN
        self._thin(except_for=-1)

    def _begin(self, segment: int) -> None:
        """Go on to the file of a segment, and thin those of older ones."""
        self.close()
        self._thin(except_for=segment)
        self._path = self._name(segment)
        self._file = atomic.open_at_end(self._path)
        self._rows.setdefault(segment, 0)
        self._segment = segment

    def _thin(self, *, except_for: int) -> None:
        """Rewrite the segments that do not hold the rows that are kept; only a few at a time do not."""
        kept_T = self._tables[0].kept_steps()
        indices, counts = np.unique(kept_T // self._layout.segment_length, return_counts=True)
        wanted = dict(zip(indices.tolist(), counts.tolist(), strict=True))
        # the newest first: a kill on the way leaves no gap behind rows that are to be deleted
        for index in sorted((self._rows.keys() | wanted.keys()) - {except_for}, reverse=True):
            if self._rows.get(index, 0) != wanted.get(index, 0):
                self._rewrite(index, kept_T)

    def _rewrite(self, index: int, kept_T: Steps) -> None:
        """Rewrite a segment with the steps that are kept. Of others, one table may have more here than the next."""
        steps_T = self._tables[0].segment(index)[0]
        stay_T = steps_T[is_among(steps_T, kept_T)]
        if not len(stay_T):
            self._name(index).unlink(missing_ok=True)
            self._rows.pop(index, None)
            return
        records_T = np.empty(len(stay_T), self._record)
        records_T["step"] = stay_T
        for name, table in zip(self._names, self._tables, strict=True):
            steps_T, values_TSL = table.segment(index)
            records_T[name] = values_TSL[is_among(steps_T, stay_T)]
        atomic.replace(self._name(index), records_T.tobytes())
        self._rows[index] = len(records_T)

    def _name(self, index: int) -> Path:
        return self._folder / f"{index * self._layout.segment_length:012d}{SUFFIX}"


def read(folder: Path, layout: Layout) -> tuple[list[NDArray[np.void]], list[str]]:
    """Read all segments in a folder.

    A record that was being written when its writer died is left out, without a word.

    Returns:
        Records by segment, their steps growing, and what is damaged, a sentence each.
    """
    parts: list[NDArray[np.void]] = []
    problems: list[str] = []
    segments = sorted(_segments(folder, layout.segment_length).items())
    for index, path in segments:
        try:
            data = path.read_bytes()
        except FileNotFoundError:  # a live run has just thinned it away
            continue
        except OSError as error:
            problems.append(f"{path} cannot be read: {error.strerror}")
            continue
        whole, torn = divmod(len(data), layout.record.itemsize)
        records_T = np.frombuffer(data, layout.record, count=whole)
        good_T = _in_order(records_T["step"], index, layout.segment_length)
        if not good_T.all():
            problems.append(f"{path}: {int((~good_T).sum())} of {whole} records are damaged")
        if torn and index != segments[-1][0]:
            problems.append(f"{path} is cut short")
        parts.append(records_T if good_T.all() else records_T[good_T])
    return parts, problems


def fill(table: Table, parts: list[NDArray[np.void]], *, name: str, layout: Layout) -> None:
    """Put what was read into an empty table. Statistics that were not recorded then are nan.

    Args:
        table: The table, with as many layers as the records have.
        parts: Records, in order.
        name: Name of the table in the records.
        layout: How the records are laid out.
    """
    recorded = layout.fields[name].statistics
    steps_T = np.concatenate([np.empty(0, "<i8"), *(part["step"] for part in parts)])
    values_TSL = np.empty((len(steps_T), *table.shape), table.dtype)
    if recorded == table.statistics:
        np.concatenate([values_TSL[:0], *(part[name] for part in parts)], out=values_TSL)
    else:
        values_TSL.fill(np.nan)
        for i in (i for i, statistic in enumerate(table.statistics) if statistic in recorded):
            column = recorded.index(table.statistics[i])
            np.concatenate([values_TSL[:0, i], *(p[name][:, column] for p in parts)], out=values_TSL[:, i])
    table.fill(steps_T, values_TSL)


def _segments(folder: Path, length: int) -> dict[int, Path]:
    """Return the files in a folder by the index of their segment."""
    return {int(p.stem) // length: p for p in folder.glob(f"*{SUFFIX}") if p.stem.isdecimal()}


def _in_order(steps_T: Steps, index: int, length: int) -> NDArray[np.bool_]:
    """Say which steps belong to the segment and are greater than all before them."""
    good_T: NDArray[np.bool_] = steps_T // length == index
    before_T = np.maximum.accumulate(np.where(good_T, steps_T, -1))
    good_T[1:] &= steps_T[1:] > before_T[:-1]
    return good_T
