"""Show saved runs side by side: a table for people, and lines or JSON for programs.

The JSON, version 1. Within a version, keys may be added, but no key is removed or changes its meaning. A number that is
NaN, infinite or unknown is null.

    version     1
    runs        list of {path, name, verdict, status, ending: {kind, reason, sentence}, created, age_s, steps,
                total_steps, world_size, loss, val_loss, val_accuracy, findings: {kind: severity}};
                verdict is "healthy", "warning", "critical", or "unknown" without a step;
                status is "finished", "interrupted", "failed", "running" or "killed"
    damaged     list of {path, problem}
"""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from gradwatch.history.disk.run_summary import FINAL, RunSummary
from gradwatch.render.common import format as units
from gradwatch.render.common.run_stats import verdict
from gradwatch.render.common.sparkline import ASCII, Glyphs, glyphs
from gradwatch.render.common.style import OK, SEVERITY, mark
from gradwatch.render.json_document import UNKNOWN, ended, strict, word

VERSION = 1
HEAD = ("verdict", "run", "steps", "loss", "val loss", "accuracy", "age", "found")
NUMBERS = HEAD[2:7]
WIDE = 110
"""Minimum columns for all metrics. A narrower table omits the training loss and one validation metric."""
NAME, FOUND, GAP = 20, 20, 2
"""Minimum columns of a name, preferred columns of the finding kinds, and columns between two cells."""
TIME = 6  # characters at the end of a name that is cut: hour, minute and second
WHOLE = 10**6  # a width that cuts nothing

KEYS: dict[str, Callable[[RunSummary], Any]] = {
    "created": lambda run: run.created,
    "name": lambda run: run.name,
    # a run without a step is unknown, and sorts after the healthy ones
    "verdict": lambda run: (run.steps > 0, -1 if run.worst_severity is None else int(run.worst_severity)),
    "status": lambda run: run.status,
    "steps": lambda run: run.steps,
    "loss": lambda run: run.loss,
    "val_loss": lambda run: run.val_loss,
    "val_accuracy": lambda run: run.val_accuracy,
}
"""Sort keys of runs."""
DESCENDING = ("created", "verdict", "steps", "val_accuracy")
"""Sort keys with the largest value first: the newest, the worst, the longest and the best run."""


def ordered(runs: Sequence[RunSummary], key: str, *, reverse: bool = False) -> list[RunSummary]:
    """Return runs in order. Runs without the value are last, also in reverse order.

    Args:
        runs: Runs in any order.
        key: One of `KEYS`.
        reverse: Whether to reverse the order.
    """
    # nan compares as false with everything, so it must not reach `sort`
    valued = [(KEYS[key](run), run) for run in runs]
    missing = [run for value, run in valued if isinstance(value, float) and math.isnan(value)]
    known = [(value, run) for value, run in valued if not (isinstance(value, float) and math.isnan(value))]
    known.sort(key=lambda pair: pair[0], reverse=(key in DESCENDING) != reverse)
    return [run for _, run in known] + missing


def dumps(runs: Sequence[RunSummary], damaged: Sequence[tuple[str, str]], *, now: datetime.datetime) -> str:
    """Return runs as one JSON document, in the format that the module docstring describes."""
    data = {
        "version": VERSION,
        "runs": [_plain(run, now) for run in runs],
        "damaged": [{"path": path, "problem": problem} for path, problem in damaged],
    }
    return json.dumps(strict(data), indent=2, allow_nan=False)


def print_runs(console: Console, runs: Sequence[RunSummary], *, now: datetime.datetime) -> None:
    """Print runs as a table that fits the terminal. In a narrow terminal, names and finding kinds are cut."""
    signs, wide = glyphs(console), console.width >= WIDE
    # the validation metric that a narrow table omits
    least = "val loss" if any(run.val_accuracy == run.val_accuracy for run in runs) else "accuracy"
    heads = [head for head in HEAD if wide or head not in ("loss", least)]
    rows = [dict(zip(HEAD, _cells(run, now, signs), strict=True)) for run in runs]
    width = {head: max(len(head), *(len(row[head]) for row in rows)) for head in heads}
    # the name takes its columns first, and the finding kinds take the rest
    room = console.width - sum(width[h] + GAP for h in heads if h not in ("run", "found"))
    width["run"] = min(width["run"], max(NAME, room - GAP - FOUND))
    width["found"] = max(0, room - GAP - width["run"])
    table = Table(box=None, padding=(0, GAP, 0, 0), header_style="dim", pad_edge=False)
    for head in heads:
        side: JustifyMethod = "right" if head in NUMBERS else "left"
        table.add_column(head, justify=side, no_wrap=True, min_width=width[head], max_width=width[head])
    for run, row in zip(runs, rows, strict=True):
        # cut again: the widths are known only now
        row["run"], row["found"] = _name(run, width["run"]), _findings_text(run, width["found"])
        table.add_row(*(row[head] for head in heads))
    console.print(table)


def lines(runs: Sequence[RunSummary], *, now: datetime.datetime) -> str:
    """Return runs as tab-separated lines: path, status, verdict, the other columns of the table, and how it ended."""
    rows = []
    for run in runs:
        # without the cells for verdict and name: they contain signs and the status
        _, _, *cells = _cells(run, now, ASCII)
        rows.append(
            [
                str(run.path),
                run.status,
                word(run.worst_severity, steps=run.steps),
                *(cell.plain for cell in cells),
                run.ending.sentence(run.steps) + (f", {run.world_size} ranks" if run.world_size > 1 else ""),
            ]
        )
    return "".join("\t".join(row) + "\n" for row in rows)


def age(seconds: float) -> str:
    """Return an age in its largest unit, such as `3 h` or `12 d`."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"  # the clock of another machine may be ahead


def _cells(run: RunSummary, now: datetime.datetime, signs: Glyphs) -> tuple[Text, ...]:
    return (
        _health(run, signs),
        _name(run, WHOLE),
        # the planned steps are shown only if they are not all done
        Text(f"{run.steps:,}" + (f"/{run.total_steps:,}" if (run.total_steps or run.steps) != run.steps else "")),
        Text(units.value(run.loss) if run.steps else units.MISSING),
        Text(units.number(run.val_loss)),
        Text(units.percent(run.val_accuracy)),
        Text(age((now - run.created).total_seconds())),
        _found(run, WHOLE),
    )


def _health(run: RunSummary, signs: Glyphs) -> Text:
    if not run.steps:
        return Text(f"? {UNKNOWN}", "dim")
    found = run.worst_severity
    word = Text(f" {found}", SEVERITY[found]) if found else Text()  # without problems, `_findings_text` has the words
    return mark(found, signs).append_text(word)


def _name(run: RunSummary, width: int) -> Text:
    ranks = f"  {run.world_size} ranks" if run.world_size > 1 else ""
    ended = ranks + ("" if run.ending.kind == "finished" else f"  {run.ending.word}")
    return Text.assemble((_cut(run.name, max(12, width - len(ended))), "bold"), (ended, "dim"))


def _cut(name: str, width: int) -> str:
    # both ends stay: the config's name, and the time of day, which distinguishes its runs
    return name if len(name) <= width else f"{name[: width - TIME - 1]}~{name[-TIME:]}"


def _findings_text(run: RunSummary, width: int) -> Text:
    """Return the finding kinds that fit, or in words that no problem was found."""
    if run.found or not run.steps:
        return _found(run, width)
    # a summary does not read the history, so it cannot judge whether the run was long enough
    health = verdict(None, is_judged=False)
    return Text(health if len(health) <= width else "", OK)


def _found(run: RunSummary, width: int) -> Text:
    """Return the finding kinds that fit, most severe first, and the number of further kinds."""
    text, rest = Text(), list(run.found.items())
    while rest:
        kind, severity = rest[0]
        more = f" +{len(rest) - 1}" if len(rest) > 1 else ""
        # 2 for the comma and the space before all but the first kind
        if len(text) + 2 * bool(text) + len(kind) + len(more) > width:
            break
        text.append(", " if text else "").append(kind, SEVERITY[severity])
        rest.pop(0)
    if rest:
        text.append(f" +{len(rest)}" if text else units.plural(len(rest), "kind"))
    return text


def _plain(run: RunSummary, now: datetime.datetime) -> dict[str, Any]:
    return {
        "path": str(run.path),
        "name": run.name,
        "verdict": word(run.worst_severity, steps=run.steps),
        "status": run.status,
        "ending": ended(run.ending, steps=run.steps),
        "created": run.created.isoformat(),
        "age_s": (now - run.created).total_seconds(),
        "steps": run.steps,
        "total_steps": run.total_steps,
        "world_size": run.world_size,
        **{name: getattr(run, name) for name in FINAL},
        "findings": {kind: str(severity) for kind, severity in run.found.items()},
    }
