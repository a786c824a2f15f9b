"""Score monitors on the fault zoo and print the table of the evaluation.

python -m scripts.fault_zoo --set dev --jobs 2
python -m scripts.fault_zoo --set dev --set opened --monitor gradwatch --monitor seed-rules --json scores.json
python -m scripts.fault_zoo --set dev --keep runs/zoo
python -m scripts.fault_zoo --list
"""

from __future__ import annotations

import argparse
import difflib
import fnmatch
import itertools
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from scripts.fault_zoo.case_sets import SETS, load_set
from scripts.fault_zoo.monitors import MONITORS, find_factory
from scripts.fault_zoo.protocol import Case
from scripts.fault_zoo.score import Row, count, score_cases
from scripts.fault_zoo.table import format_misses, format_row, format_table

TIMEOUT_S = 300.0


class UsageError(Exception):
    """A mistake in the command line."""


def known(option: str, name: str, names: Iterable[str]) -> str:
    """Return the name if it is one of the names."""
    names = list(names)
    if name in names:
        return name
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    raise UsageError(f"{option}: got '{name}', expected one of {', '.join(names)}{hint}")


def factory_of(name: str) -> str:
    """Return the factory of a monitor, given by its name or as `MODULE:FACTORY`."""
    factory = name if ":" in name else MONITORS[known("--monitor", name, MONITORS)]
    try:
        find_factory(factory)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"--monitor: '{name}' cannot be imported: {error}") from error
    return factory


def select_cases(sets: Sequence[str], only: Sequence[str]) -> dict[str, list[Case]]:
    """Return the cases of each set whose names match one of the patterns."""
    cases = {name: load_set(known("--set", name, SETS)) for name in sets}
    if not only:
        return cases
    chosen = {
        name: [case for case in several if any(fnmatch.fnmatchcase(case.name, pattern) for pattern in only)]
        for name, several in cases.items()
    }
    if not any(chosen.values()):
        raise UsageError(f"--only: no case of {', '.join(sets)} matches {', '.join(only)}")
    return {name: several for name, several in chosen.items() if several}


def list_cases(cases: dict[str, list[Case]]) -> None:
    """Print a line for each case."""
    for name, several in cases.items():
        for case in several:
            summary = (case.run.__doc__ or "").strip().partition("\n")[0]
            print(f"{name:10} {case.name:42} {case.fault or 'healthy':24} {summary}")


def print_scores(rows: Sequence[Row]) -> None:
    """Print the table, and below it the cases that each monitor missed."""
    groups = [list(group) for _, group in itertools.groupby(sorted(rows, key=_group_key), key=_group_key)]
    print(format_table([count(group) for group in groups]))
    print()
    for group in groups:
        print(*format_misses(group), sep="\n")
    for row in rows:
        if row.status == "crash":
            print(f"\n{row.case} under {row.monitor} crashed:\n{row.error}", file=sys.stderr)


def _group_key(row: Row) -> tuple[int, str]:
    return SETS.index(row.set), row.monitor


def save_scores(path: Path, rows: Sequence[Row]) -> None:
    """Write the totals and all rows to a JSON file."""
    groups = [list(group) for _, group in itertools.groupby(sorted(rows, key=_group_key), key=_group_key)]
    document = {"totals": [asdict(count(group)) for group in groups], "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(document, indent=1) + "\n")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.fault_zoo",
        description="Score monitors on training scripts with and without a planted fault.",
    )
    parser.add_argument("--set", action="append", metavar="SET", help=f"{', '.join(SETS)}; repeatable (default: dev)")
    parser.add_argument(
        "--monitor",
        action="append",
        metavar="MONITOR",
        help=f"{', '.join(MONITORS)}, or MODULE:FACTORY; repeatable (default: gradwatch)",
    )
    parser.add_argument("--only", action="append", metavar="GLOB", default=[], help="names of cases; repeatable")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time (default: 1)")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, metavar="SECONDS", help="limit for one run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write totals and rows to a JSON file")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep gradwatch's run directories as DIR/SET/CASE")
    parser.add_argument("--device", default="cpu", help="device of tensors for which a script names none, such as cuda")
    parser.add_argument("--list", action="store_true", help="list the cases and exit")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    options = parse(argv)
    try:
        cases = select_cases([*dict.fromkeys(options.set or ["dev"])], options.only)
        monitors = {name: factory_of(name) for name in options.monitor or ["gradwatch"]}
        if options.jobs < 1:
            raise UsageError(f"--jobs: got {options.jobs}, expected at least 1")
        if options.keep and [*monitors] != ["gradwatch"]:
            raise UsageError("--keep: only gradwatch writes run directories; score the other monitors without it")
        if options.keep and options.keep.exists() and any(options.keep.iterdir()):
            raise UsageError(f"--keep: {options.keep} is not empty; give a new folder")
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.list:
        list_cases(cases)
        return 0
    rows = score_cases(
        cases,
        monitors,
        jobs=options.jobs,
        timeout_s=options.timeout,
        keep=options.keep,
        device=options.device,
        report=lambda row: print(format_row(row), file=sys.stderr, flush=True),
    )
    print_scores(rows)
    if options.json:
        save_scores(options.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
