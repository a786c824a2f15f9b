"""How thresholds move where a family of runs is left out: `python scripts/studies/leave_family_out.py healthy.json`.

Reads the output of `studies/false_alarms.py --json`: the largest value of every dial in each run. A threshold that is
derived from healthy runs holds for runs of another kind only if it would have been much the same without them. So each
family is left out in turn, the largest value of all other runs is taken for the threshold, and the runs of the family
above it are counted: with exchangeable runs, one in (number of other runs + 1). The same is counted for that value
times the margin that the shipped threshold keeps over all runs.

With `--faulty faulty.json`, written by `studies/planted_faults.py --json`, it also reports the findings in faulty runs.
Each family is left out, its thresholds are derived anew from the others with the same margin, and the findings that
they give are compared with those of the thresholds as shipped. Thresholds from fewer runs are lower or the same, so
that no finding is lost; those that are gained are a further finding of the planted kind, or a false one.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from thresholds import defaults


def table(rows: list[dict[str, Any]]) -> str:
    """Return a line per dial."""
    healthy = [r for r in rows if r["learned"]]
    families = sorted({r["family"] for r in healthy})
    head = ("dial", "shipped", "largest", "in family", "without it", "over others", "over margin")
    lines = [f"{len(healthy)} healthy runs of {len(families)} families", ""]
    lines.append(f"{head[0]:36} {head[1]:>8} {head[2]:>9}  {head[3]:16} {head[4]:>10} {head[5]:>12} {head[6]:>12}")
    for dial, shipped in defaults().items():
        top = {family: max(r["largest"][dial] for r in healthy if r["family"] == family) for family in families}
        first = max(families, key=top.__getitem__)
        rest = max((value for family, value in top.items() if family != first), default=0.0)
        margin = shipped / top[first] if top[first] > 0 else float("inf")
        over, far = 0, 0
        for family in families:
            others = max((value for other, value in top.items() if other != family), default=0.0)
            mine = [r["largest"][dial] for r in healthy if r["family"] == family]
            over += sum(value > others for value in mine)
            far += sum(value > margin * others for value in mine) if others > 0 else 0
        name = f"{dial:36} {shipped:8g} {top[first]:9.3g}  {first:16} {rest:10.3g}"
        lines.append(f"{name} {over:6} runs {far:7} runs")
    return "\n".join(lines)


def faulty_table(rows: list[dict[str, Any]], faulty: list[dict[str, Any]]) -> str:
    """Return a line per dial: the faulty runs above it as shipped, and above it as derived without their own family.

    Args:
        rows: Healthy runs.
        faulty: Faulty runs, of which the same families are left out at the same time.
    """
    healthy = [r for r in rows if r["learned"]]
    families = sorted({r["family"] for r in healthy} | {r["family"] for r in faulty})
    head = ("dial", "shipped", "lowest", "found", "kept", "gained right", "gained false")
    lines = [
        f"{len(faulty)} faulty runs",
        "",
        f"{head[0]:36} {head[1]:>8} {head[2]:>8} " + " ".join(f"{h:>12}" for h in head[3:]),
    ]
    for dial, shipped in defaults().items():
        whole = max(r["largest"][dial] for r in healthy)
        count, lowest = dict.fromkeys(head[3:], 0), shipped
        for family in families:
            rest = max((r["largest"][dial] for r in healthy if r["family"] != family), default=0.0)
            derived = shipped * rest / whole if 0 < rest < whole else shipped
            lowest = min(lowest, derived)
            for r in faulty:
                if r["family"] == family:
                    _compare(count, r, dial, shipped=shipped, derived=derived)
        lines.append(f"{dial:36} {shipped:8g} {lowest:8.3g} " + " ".join(f"{n:12}" for n in count.values()))
    return "\n".join(lines)


def _compare(count: dict[str, int], row: dict[str, Any], dial: str, *, shipped: float, derived: float) -> None:
    """Count what a faulty run has above a threshold as shipped, and above the one derived without its family."""
    value, is_right = row["largest"][dial], row["fault"] == dial.partition(".")[0]
    count["found"] += value >= shipped
    count["kept"] += value >= max(shipped, derived)
    count["gained right" if is_right else "gained false"] += derived <= value < shipped


def main() -> None:
    """Print the tables of a study."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("study", type=Path, help="what studies/false_alarms.py --json wrote")
    parser.add_argument("--faulty", type=Path, help="what studies/planted_faults.py --json wrote")
    options = parser.parse_args()
    rows = json.loads(options.study.read_text())
    print(table(rows))
    if options.faulty:
        print(f"\n{faulty_table(rows, json.loads(options.faulty.read_text()))}")


if __name__ == "__main__":
    main()
