"""Plant each mutation into healthy scripts of the zoo, and count the mutants that gradwatch reports.

    python -m scripts.fault_zoo.mutants runs/mutants --each 5 --seed 1

Scripts are drawn for each mutation until it has been planted in as many as wanted. A mutant counts if its losses differ
from those of the script, or if its fault cannot change them (a graph that is kept). Many scripts check at their end
that they have learned. A mutant that fails this check has learned worse. Whether any other one is worse is not judged,
so a mild one may rightly go unreported. Results are kept in the folder, and what is there is not run again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from scripts.fault_zoo.case_sets import SETS, load_set
from scripts.fault_zoo.monitors import NO_MONITOR, attach_gradwatch
from scripts.fault_zoo.mutations import MUTATIONS, NotApplicableError
from scripts.fault_zoo.protocol import Case, Finding, Monitor
from scripts.fault_zoo.worker import CaseRun, Job, run_apart

VARIABLE = "FAULT_ZOO_MUTATION"
"""Environment variable that tells a worker which mutation to plant."""

MUTANT = "scripts.fault_zoo.mutants:attach_to_mutant"
TIMEOUT_S = 240.0
EQUAL = 1e-5
"""Relative distance of two losses up to which they are the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of a mutant.

    Attributes:
        mutation: Name of the mutation.
        script: Name of the script.
        is_worse: The script fails its own check, or stops.
        kinds: Kinds of the findings that count.
    """

    mutation: str
    script: str
    is_worse: bool
    kinds: tuple[str, ...]

    @property
    def is_right(self) -> bool:
        """Whether a right kind was reported."""
        return bool(set(self.kinds) & set(MUTATIONS[self.mutation].kinds))


def attach_to_mutant(model: Any, optimizer: Any, **options: Any) -> Monitor:
    """Plant the mutation that the environment names at the first call, and attach gradwatch.

    Raises:
        NotApplicableError: The script has nothing to change.
    """
    if name := os.environ.pop(VARIABLE, None):
        if not isinstance(model, nn.Module) or not isinstance(optimizer, Optimizer):
            raise NotApplicableError
        MUTATIONS[name].plant(model, optimizer, random.Random(0))
    return attach_gradwatch(model, optimizer, **options)


def run(case: Case, monitor: str, planted: str | None, file: Path, *, variable: str = VARIABLE) -> CaseRun:
    """Run a script, or read what became of it from a file.

    Args:
        case: The script.
        monitor: Factory of the monitor, `MODULE:FACTORY`, which plants what the environment names.
        planted: Name of what is planted, or None.
        file: File of the result.
        variable: Environment variable that names it.
    """
    if file.exists():
        values = json.loads(file.read_text())
        return CaseRun(**values | {"findings": [Finding(**finding) for finding in values["findings"]]})
    if planted:
        os.environ[variable] = planted
    result = run_apart(Job(case.module, case.name, monitor), timeout_s=TIMEOUT_S)
    os.environ.pop(variable, None)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(asdict(result)))
    return result


def results(folder: Path, mutation: str, cases: list[Case], *, each: int) -> Iterator[Result]:
    """Yield the mutants of a mutation, until there are `each`."""
    left = each
    for case in cases:
        if not left:
            return
        mutant = run(case, MUTANT, mutation, folder / mutation.replace(" ", "_") / f"{case.name}.json")
        if NotApplicableError.__name__ in (mutant.error or ""):
            continue
        healthy = run(case, NO_MONITOR, None, folder / "healthy" / f"{case.name}.json")
        is_same = all(math.isclose(a, b, rel_tol=EQUAL) for a, b in zip(healthy.losses, mutant.losses, strict=False))
        if healthy.error or (is_same and not mutant.error and mutation != "graphs kept"):
            continue
        left -= 1
        kinds = tuple(sorted({finding.kind for finding in mutant.findings if finding.severity != "info"}))
        yield Result(mutation=mutation, script=case.name, is_worse=mutant.error is not None, kinds=kinds)


def row(name: str, of: list[Result]) -> str:
    """Return the row of a table: mutants, reported, and the same of those that learned worse."""
    worse = [result for result in of if result.is_worse]
    shares = [
        f"{sum(bool(r.kinds) for r in part)}, {sum(r.is_right for r in part)} of {len(part)}" for part in (worse, of)
    ]
    return f"| {name} | {shares[0]} | {shares[1]} |"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--each", type=int, default=5, help="mutants of each mutation")
    parser.add_argument("--seed", type=int, default=0, help="which scripts are drawn")
    parser.add_argument("--only", action="append", choices=list(MUTATIONS), help="a mutation; may be repeated")
    return parser.parse_args(arguments)


def main() -> None:
    """Run the mutants and print the table."""
    options = parse()
    healthy = [case for name in SETS for case in load_set(name) if case.fault is None]
    found: list[Result] = []
    print("| mutation | learned worse: reported, right kind | all: reported, right kind |\n|---|---|---|")
    for name in options.only or MUTATIONS:
        cases = random.Random(f"{name} {options.seed}").sample(healthy, len(healthy))
        part = list(results(options.folder, name, cases, each=options.each))
        print(row(name, part), flush=True)
        found += part
    print(row("all", found))
    for result in found:
        if result.is_worse and not result.is_right:
            print(f"not found: {result.mutation}, {result.script}: {', '.join(result.kinds) or 'nothing'}")


if __name__ == "__main__":
    main()
