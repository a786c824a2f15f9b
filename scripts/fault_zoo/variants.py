"""Run scripts of the zoo in other ways to write the same training, and count what gradwatch still finds.

    python -m scripts.fault_zoo.variants runs/variants --each 10 --seed 1

Scripts are drawn for each variation: faulty ones that are found as they are, and healthy ones without an alarm. A
variant that fails without a monitor, too, is left out. Results are kept in the folder, and what is there is not run
again.
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from scripts.fault_zoo.case_sets import SETS, load_set
from scripts.fault_zoo.judge import judge
from scripts.fault_zoo.monitors import attach_gradwatch, attach_nothing
from scripts.fault_zoo.mutants import run
from scripts.fault_zoo.mutations import NotApplicableError
from scripts.fault_zoo.protocol import Attach, Case, Monitor
from scripts.fault_zoo.variations import VARIATIONS, Told, VariedMonitor
from scripts.fault_zoo.worker import CaseRun

VARIABLE = "FAULT_ZOO_VARIATION"
"""Environment variable that tells a worker which variation to make."""

WATCHED = "scripts.fault_zoo.variants:attach_to_variant"
BARE = "scripts.fault_zoo.variants:attach_nothing_to_variant"
SEED = 1000

if os.environ.get(VARIABLE) == "another seed":  # a worker imports this module before the script begins
    _true = torch.manual_seed
    torch.manual_seed = lambda seed: _true(int(seed) + SEED)


def attach_to_variant(model: Any, optimizer: Any, **options: Any) -> Monitor:
    """Make the variation that the environment names, and attach gradwatch.

    Raises:
        NotApplicableError: The script cannot be varied so.
    """
    return _attach(attach_gradwatch, model, optimizer, options)


def attach_nothing_to_variant(model: Any, optimizer: Any, **options: Any) -> Monitor:
    """Make the variation without a monitor. Errors as for `attach_to_variant`."""
    return _attach(attach_nothing, model, optimizer, options)


def _attach(attach: Attach, model: Any, optimizer: Any, options: dict[str, Any]) -> Monitor:
    told = Told(options)
    if name := os.environ.get(VARIABLE):
        if not isinstance(model, nn.Module) or not isinstance(optimizer, Optimizer):
            raise NotApplicableError
        VARIATIONS[name](model, optimizer, told)
    return VariedMonitor(attach(model, optimizer, **told.options), told)


class Variants:
    """Runs of scripts in a folder.

    Args:
        folder: Folder of the results.
        variation: Name of the variation.
    """

    def __init__(self, folder: Path, variation: str) -> None:
        self._folder, self._variation = folder, variation
        self.faulty, self.found, self.healthy, self.alarms = 0, 0, 0, 0
        self.lost: list[str] = []

    def add(self, case: Case) -> None:
        """Run a script as it is and varied, and count it if it can be compared."""
        plain = run(case, WATCHED, None, self._folder / "plain" / f"{case.name}.json")
        before = judge(case, plain.findings)
        if not before.is_found if case.fault else before.wrong_kinds:
            return
        varied = self._run(case, WATCHED)
        if varied.error and not plain.error and self._run(case, BARE).error:
            return
        after = judge(case, varied.findings)
        if case.fault:
            self.faulty, self.found = self.faulty + 1, self.found + after.is_found
        else:
            self.healthy, self.alarms = self.healthy + 1, self.alarms + bool(after.wrong_kinds)
        if not after.is_found if case.fault else after.wrong_kinds:
            kinds = sorted({finding.kind for finding in varied.findings if finding.severity != "info"})
            self.lost.append(f"{self._variation}, {case.name} ({case.fault}): {', '.join(kinds) or 'nothing'}")

    def _run(self, case: Case, monitor: str) -> CaseRun:
        name = f"{case.name}{'' if monitor == WATCHED else '.bare'}.json"
        file = self._folder / self._variation.replace(" ", "_") / name
        return run(case, monitor, self._variation, file, variable=VARIABLE)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--each", type=int, default=10, help="faulty scripts of each variation")
    parser.add_argument("--healthy", type=int, default=4, help="healthy scripts of each variation")
    parser.add_argument("--seed", type=int, default=0, help="which scripts are drawn")
    parser.add_argument("--fault", action="append", help="a kind of fault; may be repeated")
    parser.add_argument("--only", action="append", choices=list(VARIATIONS), help="a variation; may be repeated")
    return parser.parse_args(arguments)


def main() -> None:
    """Run the variants and print the table."""
    options = parse()
    cases = [case for name in SETS for case in load_set(name) if not options.fault or case.fault in options.fault]
    lost: list[str] = []
    print("| variation | faults found | healthy runs with an alarm |\n|---|---|---|")
    for name in options.only or VARIATIONS:
        variants = Variants(options.folder, name)
        for case in random.Random(f"{name} {options.seed}").sample(cases, len(cases)):
            if variants.faulty < options.each if case.fault else variants.healthy < options.healthy:
                variants.add(case)
        counts = f"{variants.found} of {variants.faulty} | {variants.alarms} of {variants.healthy}"
        print(f"| {name} | {counts} |", flush=True)
        lost += variants.lost
    for line in lost:
        print(f"not the same: {line}")


if __name__ == "__main__":
    main()
