"""Format the scores as a Markdown table and as lines of text."""

from __future__ import annotations

from collections.abc import Sequence

from scripts.fault_zoo.score import Row, Totals

COLUMNS = (
    "set",
    "monitor",
    "found",
    "right kind first",
    "layer named",
    "median steps to detection",
    "healthy with alarm",
    "perturbed",
)


def format_table(totals: Sequence[Totals]) -> str:
    """Return the table of the evaluation, one line per set and monitor."""
    lines = [COLUMNS, ("---",) * len(COLUMNS), *map(_cells, totals)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cells(t: Totals) -> tuple[str, ...]:
    median = "-" if t.median_steps_to_detection is None else f"{t.median_steps_to_detection:g}"
    return (
        t.set,
        t.monitor,
        _share(t.found, t.faulty),
        _share(t.right_first, t.faulty),
        _share(t.layer_named, t.layer_named_of),
        median,
        _share(t.alarms, t.healthy),
        _share(t.perturbed, t.runs),
    )


def _share(part: int, whole: int) -> str:
    return f"{part}/{whole} ({part / whole:.0%})" if whole else "-"


def format_misses(rows: Sequence[Row]) -> list[str]:
    """Return lines that name the missed cases, the alarms on healthy scripts, and the runs that failed."""
    groups = {
        "missed": [f"{r.case} ({r.fault})" for r in rows if r.fault and not r.judgement.is_found],
        "alarms": [f"{r.case} ({', '.join(r.judgement.wrong_kinds)})" for r in rows if not r.fault and is_alarm(r)],
        "perturbed": [r.case for r in rows if r.is_perturbed],
        "crashed": [r.case for r in rows if r.status == "crash"],
        "timed out": [r.case for r in rows if r.status == "timeout"],
    }
    always = "missed"
    return [
        f"{rows[0].set}, {rows[0].monitor}, {group}: {', '.join(names) or 'none'}"
        for group, names in groups.items()
        if names or group == always
    ]


def is_alarm(row: Row) -> bool:
    """Return whether a monitor reported something about a healthy script."""
    return row.fault is None and bool(row.judgement.wrong_kinds)


def format_row(row: Row) -> str:
    """Return one line about one run, for the progress of a long evaluation."""
    judgement = row.judgement
    if row.fault is None:
        outcome = "ALARM" if is_alarm(row) else "quiet"
    else:
        outcome = "found" if judgement.is_found else "MISSED"
    facts = [row.fault or "healthy"]
    if judgement.steps_to_detection is not None:
        facts.append(f"after {judgement.steps_to_detection} steps")
    if judgement.is_found and judgement.is_layer_named is False:
        facts.append("wrong layer")
    if judgement.is_found and not judgement.is_right_first:
        facts.append("other kind first")
    if judgement.wrong_kinds:
        facts.append(f"wrong: {', '.join(judgement.wrong_kinds)}")
    facts += [row.status] if row.status != "ok" else []
    facts += ["perturbed"] if row.is_perturbed else []
    return f"{outcome:6} {row.set:9} {row.monitor:12} {row.case:40} {'; '.join(facts)}"
