"""Pack the numbers of a report as plain data: statistics by layer and column, curves of the run, findings."""

# T = recorded steps, L = rows of a table, W = columns of the report

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradwatch import catalogue
from gradwatch.history.store import History, Table
from gradwatch.records import Finding
from gradwatch.render.common.heatmap import SCALE
from gradwatch.render.common.series import EVERY_STEP, USUAL, nan_as_inf
from gradwatch.render.report import encoding as pack

VERSION = 1
MOST_COLUMNS, LEAST_COLUMNS = 720, 60
"""Number of columns for a small and for a huge model. More than 720 would not be visible on most screens."""
MAX_CELLS = 360_000
"""Approximate number of cells in all statistics, rows times columns. They take about 2 MB of text."""
MOST_BYTES = 1_500_000
"""Maximum bytes of text for the packed numbers. Very noisy numbers take more, so they get fewer columns."""
CURVE_COLUMNS = 720

Floats = NDArray[np.floating[Any]]
GRADIENT = "grad."
FRACTION = "_frac"


def packed(history: History) -> tuple[dict[str, Any], str]:
    """Return all numbers of a run for the page, with as many columns as fit.

    Returns:
        Plain data for JSON, and the codes of all statistics by layer, compressed and in base64.
    """
    document = {
        "version": VERSION,
        "scale": SCALE,
        "step": history.step,
        "rows": {"param": _params(history), "act": [{"name": a.name} for a in history.info.activations]},
        "findings": [_finding(finding, history) for finding in history.findings],
        "curves": list(_curves(history)),
        "gaps": _stretches(steps_without_gradient(history), history.param.kept_steps()),
    }
    coded = list(_coded(history))  # encoded once: only the columns change from try to try
    most = _most_columns(history)
    while True:
        columns: list[dict[str, Any]] = []
        described, parts = [], []
        for entry, steps_T, codes_TL in coded:
            found = pack.bins(steps_T, most)
            described.append(entry | {"columns": _place(found, columns)})
            parts.append(pack.planes(codes_TL, found))
        text = pack.deflated(b"".join(parts))
        if len(text) <= MOST_BYTES or most <= LEAST_COLUMNS:
            return document | {"columns": columns, "statistics": described}, text
        # proportional, and 5 % less so that few tries are needed; the minimum ends the loop
        most = max(int(0.95 * most * MOST_BYTES / len(text)), LEAST_COLUMNS)


def _most_columns(history: History) -> int:
    tables = (history.param, history.act)
    cells = sum(len(table.statistics) * len(table.layers) for table in tables)
    return min(max(MAX_CELLS // max(cells, 1), LEAST_COLUMNS), MOST_COLUMNS)


def _params(history: History) -> list[dict[str, Any]]:
    """Return the page's data of each parameter tensor. Gradients flow through the `main` tensors."""
    main = [len(p.shape) > 1 and p.trainable for p in history.info.layers]
    return [
        {
            "name": p.name,
            "about": f"{p.module_type}, {' x '.join(map(str, p.shape)) or 'scalar'}, {p.dtype}"
            + ("" if p.trainable else ", frozen"),
            "main": is_main or not any(main),  # all, in a model without a trainable matrix
        }
        for p, is_main in zip(history.info.layers, main, strict=True)
    ]


def _coded(history: History) -> Iterator[tuple[dict[str, Any], pack.Steps, pack.Codes]]:
    """Yield each statistic that has a value: its description, the steps that measured it, and its codes."""
    for of, table, known in (("param", history.param, catalogue.PARAM), ("act", history.act, catalogue.ACT)):
        steps_T, values_TSL = table.rows()
        for i, statistic in enumerate(known):
            missing_TL = _missing(statistic.name, values_TSL, table)
            measured_T = ~missing_TL.all(axis=1)
            if not measured_T.any():
                continue
            if statistic.name.startswith(GRADIENT):  # every step has gradients, so a step without any is a gap
                measured_T = np.ones_like(measured_T)
            is_log = not statistic.name.endswith(FRACTION)  # fractions are often exactly 0
            codes_TL, scale = pack.encode(values_TSL[measured_T, i], missing_TL=missing_TL[measured_T], log=is_log)
            described = {
                "name": statistic.name,
                "unit": statistic.unit,
                "meaning": statistic.meaning,
                "of": of,
                "scale": asdict(scale),
            }
            yield described, steps_T[measured_T], codes_TL


def steps_without_gradient(history: History) -> NDArray[np.int64]:
    """Return the recorded steps whose backward pass was skipped: without a finite loss and without any gradient."""
    steps_T, counts_TL = history.param.series("grad.nonfinite")
    if not history.info.layers:
        return steps_T[:0]
    return steps_T[np.isnan(counts_TL).all(axis=1) & ~np.isfinite(history["loss"])]


def _stretches(chosen_T: NDArray[np.int64], steps_T: NDArray[np.int64]) -> list[list[int]]:
    """Return the first and last step of each stretch of chosen steps with no other recorded step between them."""
    if not chosen_T.size:
        return []
    at_T = np.searchsorted(steps_T, chosen_T)
    parts = np.split(chosen_T, np.flatnonzero(np.diff(at_T) > 1) + 1)
    return [[int(part[0]), int(part[-1])] for part in parts]


def _missing(statistic: str, values_TSL: Floats, table: Table) -> NDArray[np.bool_]:
    # nan in a gradient statistic may be a measured NaN: only `grad.nonfinite` shows if a gradient was there
    absent = "grad.nonfinite" if statistic.startswith(GRADIENT) else statistic
    missing_TL: NDArray[np.bool_] = np.isnan(values_TSL[:, table.statistics.index(absent)])
    return missing_TL


def _place(found: pack.Bins, columns: list[dict[str, Any]]) -> int:
    """Return the index of the columns in the list of all columns, after adding them if they are new."""
    # most statistics have the same steps, so the page holds their columns once
    data = {"first": found.steps_W.tolist(), "last": found.last_W.tolist(), "thinned": not found.are_steps}
    if data not in columns:
        columns.append(data)
    return columns.index(data)


def _curves(history: History) -> Iterator[dict[str, Any]]:
    """Yield the statistics of the run that have a value, as float32: median, minimum and maximum by column."""
    steps_T, values_TSL = history.run.rows()
    meanings = {s.name: (s.unit, s.meaning) for s in catalogue.RUN}
    for i, name in enumerate(history.run.statistics):
        # a NaN loss must not look like a missing one
        values_T = nan_as_inf(values_TSL[:, i, 0]) if name in EVERY_STEP else values_TSL[:, i, 0]
        known_T = ~np.isnan(values_T)
        if name == "batch_hash" or not known_T.any():  # a hash is not a measurement
            continue
        unit, meaning = meanings.get(name) or ("", f"learning rate of optimizer group {name.partition('.')[2]}")
        found = pack.bins(steps_T[known_T], CURVE_COLUMNS)
        parts = _spread(values_T[known_T], found)
        yield {
            "name": name,
            "unit": unit,
            "meaning": meaning,
            "first": found.steps_W.tolist(),
            "last": found.last_W.tolist(),
            "values": [base64.b64encode(part_W.astype("<f4").tobytes()).decode("ascii") for part_W in parts],
        }


def _spread(values_T: Floats, found: pack.Bins) -> list[Floats]:
    """Return the median of each column, and if a column has several steps, also its minimum and maximum."""
    if found.are_steps:
        return [values_T]
    ends = np.append(found.first_W[1:], len(values_T))
    # sorted once for median, minimum and maximum; the lower median is a value that was measured
    parts = [np.sort(values_T[first:end]) for first, end in zip(found.first_W, ends, strict=True)]
    return [
        np.array(of) for of in ([p[(len(p) - 1) // 2] for p in parts], [p[0] for p in parts], [p[-1] for p in parts])
    ]


def _finding(finding: Finding, history: History) -> dict[str, Any]:
    # for each table the rows of each named layer, which may be a module with several tensors
    rows = {"param": _rows(finding, history, history.param), "act": _rows(finding, history, history.act)}
    tables = {"param": history.param, "act": history.act}
    recorded = [name for of, table in tables.items() if rows[of] for name in table.statistics]
    return {
        "code": finding.code,
        "kind": finding.kind,
        "layer": finding.layer,
        "step": finding.since,
        "severity": str(finding.severity),
        "statistic": next((name for name in (*(q.key for q in finding.evidence), *USUAL) if name in recorded), ""),
        **rows,
    }


def _rows(finding: Finding, history: History, table: Table) -> list[list[int]]:
    found = (_rows_of(name, history, table) for name in finding.names)
    return [rows for rows in found if rows]


def _rows_of(layer: str, history: History, table: Table) -> list[int]:
    """Return the rows of a layer in a table: its own row, or the rows of all parameters of a module."""
    if layer in table.layers:
        return [table.layers.index(layer)]
    return [i for i, p in enumerate(history.info.layers) if p.module == layer] if table is history.param else []
