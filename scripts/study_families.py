"""How thresholds move where a family of runs is left out: `python scripts/study_families.py healthy.json`.

Reads what `study_healthy.py --json` wrote: per run the largest value of every dial. A threshold that is derived from
healthy runs holds for runs of another kind only if it would have been much the same without them. So each family is
left out in turn, the largest value of all other runs is taken for the threshold, and the runs of the family that lie
above it are counted: with exchangeable runs, one in (number of other runs + 1). The same is counted for that value
times the margin that the shipped threshold keeps over all runs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from study_dials import defaults


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


def main() -> None:
    """Print the table of a study."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("study", type=Path, help="what study_healthy.py --json wrote")
    print(table(json.loads(parser.parse_args().study.read_text())))


if __name__ == "__main__":
    main()
