"""Export a history as one Parquet file in long format: a row per step, layer and statistic."""

# T = kept steps, L = layers of a table

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from gradwatch import catalogue
from gradwatch._version import __version__
from gradwatch.errors import GradwatchError
from gradwatch.history.disk import atomic
from gradwatch.history.store import History
from gradwatch.history.table import Floats, Steps, Table

NAME = "history.parquet"
"""Default name of the file in a run directory."""
SCHEMA_VERSION = 1
"""Version of the columns and of their meaning; new statistics do not change it."""
MAX_GROUP_ROWS = 1 << 20
"""Rows of a row group; one group is in memory. 8,000 kept steps of 500 layers take 130 MB; a quarter saves none."""


def write_parquet(history: History, path: Path) -> None:
    """Write all kept values of a history to a Parquet file, atomically.

    Each row group has one statistic, so that a reader that filters by statistic skips all others.

    Args:
        history: The history.
        path: The file, which is replaced if it exists.

    Raises:
        GradwatchError: pyarrow is not installed, or the file cannot be written.
    """
    pyarrow, parquet = _import_pyarrow()
    schema = _schema(pyarrow, history)
    with (
        atomic.replacement(path) as temporary,
        temporary.open("wb") as file,  # by Python, whose errors say why a disk refuses
        parquet.ParquetWriter(file, schema, compression="zstd") as writer,
    ):
        for table in (history.run, history.param, history.act):
            for statistic in table.statistics:
                for steps_T, values_TL in _chunks(table, statistic):
                    layers = None if table is history.run else table.layers
                    writer.write_table(_group(pyarrow, schema, steps_T, values_TL, statistic, layers))


def _import_pyarrow() -> tuple[ModuleType, ModuleType]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise GradwatchError(
            "export: needs pyarrow, which is not installed here: pip install 'gradwatch[parquet]'"
        ) from error
    return pyarrow, pyarrow.parquet


def _schema(pyarrow: Any, history: History) -> Any:
    """Return the columns, and the description of the run as metadata of the file."""
    text = pyarrow.dictionary(pyarrow.int32(), pyarrow.string())  # pandas reads it as a category
    statistics = (*catalogue.RUN, *catalogue.PARAM, *catalogue.ACT)
    return pyarrow.schema(
        [
            pyarrow.field("step", pyarrow.int64(), nullable=False),
            pyarrow.field("layer", text),
            pyarrow.field("statistic", text, nullable=False),
            pyarrow.field("value", pyarrow.float64(), nullable=False),
        ],
        metadata={
            "gradwatch.schema": str(SCHEMA_VERSION),
            "gradwatch.version": __version__,
            "gradwatch.run": json.dumps(history.info.to_json()),
            "gradwatch.units": json.dumps({s.name: s.unit for s in statistics if s.unit}),
        },
    )


def _chunks(table: Table, statistic: str) -> Iterator[tuple[Steps, Floats]]:
    """Yield the kept steps (T,) and values (T, L) of a statistic, in pieces of at most `MAX_GROUP_ROWS` values."""
    steps_T, values_TL = table.series(statistic)
    if not values_TL.size:  # no step, or no layer such as in a model without activations
        return
    length = max(1, MAX_GROUP_ROWS // values_TL.shape[1])
    for first in range(0, len(steps_T), length):
        piece = slice(first, first + length)
        yield steps_T[piece], values_TL[piece]


def _group(
    pyarrow: Any, schema: Any, steps_T: Steps, values_TL: Floats, statistic: str, layers: tuple[str, ...] | None
) -> Any:
    """Return the rows of a row group, step by step. Without layers, the column `layer` is null."""
    num_steps, num_layers = values_TL.shape
    num_rows = num_steps * num_layers
    if layers is None:
        layer = pyarrow.nulls(num_rows, schema.field("layer").type)
    else:
        indices = np.tile(np.arange(num_layers, dtype=np.int32), num_steps)
        layer = pyarrow.DictionaryArray.from_arrays(indices, list(layers))
    columns = [
        np.repeat(steps_T, num_layers),
        layer,
        pyarrow.DictionaryArray.from_arrays(np.zeros(num_rows, np.int32), [statistic]),
        # float64 holds float32 and 48-bit hashes exactly; NaN stays NaN, since `from_pandas` is off
        values_TL.reshape(-1).astype(np.float64),
    ]
    return pyarrow.table(columns, schema=schema)
