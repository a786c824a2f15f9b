"""Read a table from a CSV file: numbers in the feature columns, a label or a number in the target column."""

# N = rows, F = features

from __future__ import annotations

import csv
import io
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from gradwatch.data import Splits, _tables
from gradwatch.errors import GradwatchError, did_you_mean
from gradwatch.paths import user_path

Rows = list[list[str]]


def build(
    *,
    file: str,
    target_column: str | int = -1,
    features: list[str | int] | None = None,
    kind: Literal["auto", "classes", "values"] = "auto",
    header: bool = True,
    delimiter: str = ",",
    standardize: bool = True,
    val_fraction: float = 0.2,
    split_seed: int = 0,
) -> Splits:
    """Return the rows of a CSV file as float32 features, with classes or values as targets.

    Args:
        file: UTF-8 text, one sample a line.
        target_column: Name or number of the column to predict; -1 is the last.
        features: Names or numbers of the columns to predict it from; null is all the others.
        kind: `classes`, `values` (regression), or `auto`: whole numbers and words are classes, fractions are values,
            and numbers that mostly occur once are rejected.
        header: Whether the first line names the columns.
        delimiter: Character between two cells.
        standardize: Bring each feature to mean 0 and standard deviation 1 over the training part.
        val_fraction: Fraction of the rows that is held out for validation, the same for each class.
        split_seed: Seed of that choice.
    """
    names, rows = _read(user_path(file), header=header, delimiter=delimiter)
    target = _column(target_column, names, key="data.target_column")
    used = [i for i in range(len(names)) if i != target]
    if features is not None:
        used = [_column(name, names, key="data.features") for name in features]
    if not used or target in used:
        raise GradwatchError(f"data.features: got {features}, expected columns other than the target '{names[target]}'")
    first_line = 2 if header else 1
    inputs = np.stack([_numbers(rows, i, names=names, first_line=first_line) for i in used], axis=1)
    labels = _targets(rows, target, names=names, first_line=first_line, kind=kind)
    choice = _tables.choose_kind(labels, kind, place=f"column '{names[target]}'")
    targets, outputs, classes = _tables.encode(labels, choice.kind)
    train, val = _tables.held_out(targets, choice.kind, val_fraction=val_fraction, seed=split_seed)
    parts = [(inputs[part], targets[part]) for part in (train, val)]
    splits = _tables.splits(*parts, choice=choice, outputs=outputs, classes=classes, standardized=standardize)
    return replace(splits, features=tuple(names[i] for i in used))


def _read(path: Path, *, header: bool, delimiter: str) -> tuple[list[str], Rows]:
    """Return the names of the columns (their numbers without a header) and the rows, all of equal length."""
    if len(delimiter) != 1:
        raise GradwatchError(f"data.delimiter: got {delimiter!r}, expected one character")
    try:
        # utf-8-sig: a byte order mark, as Excel writes it, must not become part of the first column's name
        lines = io.StringIO(path.read_bytes().decode("utf-8-sig"), newline="")
        rows = list(csv.reader(lines, delimiter=delimiter))
    except FileNotFoundError as error:
        raise GradwatchError(f"data.file: no file {path.absolute()}, expected a CSV table") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise GradwatchError(f"data.file: {path}, line {line} is not UTF-8 text; convert the file first") from error
    except (OSError, csv.Error) as error:
        raise GradwatchError(f"data.file: cannot read {path} as a CSV table: {error}") from error
    while rows and not rows[-1]:
        rows.pop()  # blank lines at the end of the file
    names = rows.pop(0) if header and rows else [str(i) for i in range(len(rows[0]) if rows else 0)]
    if not rows:
        raise GradwatchError(f"data.file: {path} holds no row of data, expected at least one sample")
    for number, row in enumerate(rows, start=2 if header else 1):
        if len(row) != len(names):
            raise GradwatchError(
                f"data.file: {path}, row {number} has {len(row)} cells, expected {len(names)}; is data.delimiter right?"
            )
    return [name.strip() for name in names], rows


def _column(wanted: str | int, names: list[str], *, key: str) -> int:
    if isinstance(wanted, int):
        if -len(names) <= wanted < len(names):
            return wanted % len(names)
        raise GradwatchError(f"{key}: there is no column {wanted}, expected one from 0 to {len(names) - 1}")
    if names.count(wanted) == 1:
        return names.index(wanted)
    if wanted in names:
        raise GradwatchError(f"{key}: {names.count(wanted)} columns are called '{wanted}'; give the column's number")
    raise GradwatchError(
        f"{key}: there is no column '{wanted}', expected one of {', '.join(names)}{did_you_mean(wanted, names)}"
    )


def _numbers(rows: Rows, column: int, *, names: list[str], first_line: int) -> NDArray[np.float64]:
    """Return a column as numbers, shape (N,), or raise an error with the first cell that is not a finite number."""
    cells = [row[column] for row in rows]
    try:
        values = np.array(cells, np.float64)
    except ValueError:  # slow, cell by cell, to find the bad cell
        values = np.array([_number(cell) for cell in cells])
    if len(bad := np.flatnonzero(~np.isfinite(values))):
        _refuse(cells[bad[0]], place=_cell(bad[0] + first_line, names[column]), expected="a finite number")
    return values


def _number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return float("nan")  # refused by the caller, which knows row and column


def _cell(row: int, column: str) -> str:
    return f"row {row}, column '{column}'"


def _refuse(cell: str, *, place: str, expected: str) -> None:
    missing = cell.strip().lower() in ("", "nan", "na", "null", "none")
    raise GradwatchError(
        f"data.file: {place} {'is missing' if not cell.strip() else f'is {cell!r}'}, expected {expected}; "
        + ("gradwatch fills in nothing: complete or remove such rows" if missing else "leave it out of data.features")
    )


def _targets(rows: Rows, column: int, *, names: list[str], first_line: int, kind: str) -> NDArray[np.generic]:
    """Return the target column as int64, float64 or strings: the narrowest type that every cell can be read as."""
    cells = [row[column].strip() for row in rows]
    if "" in cells:
        is_number = kind != "classes" and all(_number(cell) == _number(cell) for cell in cells if cell)
        place = _cell(cells.index("") + first_line, names[column])
        _refuse("", place=place, expected="a finite number" if is_number else "a label")
    if kind == "values":
        return _numbers(rows, column, names=names, first_line=first_line)
    try:
        return np.array([int(cell) for cell in cells], np.int64)
    except (ValueError, OverflowError):
        pass  # not whole numbers, so the targets are fractions or words
    try:
        [float(cell) for cell in cells]
    except ValueError:
        return np.array(cells)
    # fractions as classes keep their text, so that each spelling is a label
    return np.array(cells) if kind == "classes" else _numbers(rows, column, names=names, first_line=first_line)
