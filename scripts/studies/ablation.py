"""Ablate the mechanisms of the detectors: switch each off in turn, and judge the kept runs of the fault zoo again.

    python -m scripts.fault_zoo --set dev --set opened --set published --keep runs/zoo
    python scripts/studies/ablation.py runs/zoo --jobs 2 --page docs/ablation.md

A mechanism is a function or a method of a detector that may return signs or findings, mark tensors or end a finding; or
a whole detector; or a kind of event that detectors read. Detection is repeated on the stored rows and events, so
nothing is trained again. Judged are the same counts as in the zoo's table: a mechanism carries weight if without it a
fault, a first kind or a layer is lost, or a healthy run has an alarm.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import functools
import inspect
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import yaml

REPOSITORY = Path(__file__).parents[2]
sys.path.insert(0, str(REPOSITORY))

from gradwatch.detect import Detector, detectors  # noqa: E402
from gradwatch.history.disk.writer import read  # noqa: E402
from gradwatch.history.store import History  # noqa: E402
from gradwatch.pipeline.redetect import redetect  # noqa: E402
from gradwatch.records import Finding  # noqa: E402
from scripts.fault_zoo.case_sets import SETS, load_set  # noqa: E402
from scripts.fault_zoo.judge import Judgement, judge  # noqa: E402
from scripts.fault_zoo.mechanisms import Mechanism, mechanisms, replaced, silent  # noqa: E402
from scripts.fault_zoo.protocol import Case  # noqa: E402
from scripts.fault_zoo.protocol import Finding as ZooFinding  # noqa: E402

KEPT = Path(__file__).with_name("kept_mechanisms.yaml")
"""Why a mechanism stays that carries no weight in the kept runs."""


@dataclass(frozen=True)
class Effect:
    """The cases that change without one mechanism, and those in which it is at work."""

    runs: frozenset[str] = frozenset()
    lost: frozenset[str] = frozenset()
    lost_first: frozenset[str] = frozenset()
    lost_layer: frozenset[str] = frozenset()
    later: frozenset[str] = frozenset()
    prevented: frozenset[str] = frozenset()
    alarms: frozenset[str] = frozenset()
    gained: frozenset[str] = frozenset()

    @property
    def weight(self) -> tuple[int, ...]:
        """What gets worse without the mechanism, the worst first."""
        return tuple(map(len, (self.lost, self.prevented, self.lost_first, self.lost_layer, self.later, self.runs)))

    @property
    def is_idle(self) -> bool:
        """Whether nothing gets worse without it but the step at which a fault is found."""
        return not any(self.weight[:4])

    def __or__(self, other: Effect) -> Effect:
        return Effect(*(getattr(self, f.name) | getattr(other, f.name) for f in fields(Effect)))


def detect(history: History, *, without: Mechanism | None = None) -> list[ZooFinding]:
    """Return the findings in a run."""
    asked: Sequence[Detector] = detectors()
    context: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    events = list(history.events)
    if without is not None:
        context = replaced(without, silent)
        asked = [d for d in asked if d.kind != without.kind]
        history.events[:] = [e for e in events if e.kind != without.event]
    try:
        with context:
            found = redetect(history, asked).findings
    finally:
        history.events[:] = events
    return _as_zoo(found)


def _as_zoo(findings: Sequence[Finding]) -> list[ZooFinding]:
    return [ZooFinding(f.kind, layer, f.step, str(f.severity)) for f in findings for layer in f.names or (None,)]


def fired_in(history: History) -> set[str]:
    """Return the names of the functions that saw something in a run."""
    fired: set[str] = set()

    def recording(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def make(function: Callable[..., Any]) -> Callable[..., Any]:
            is_iterator = str(inspect.signature(function).return_annotation).startswith("Iterator")

            def call(*args: Any, **options: Any) -> Any:
                result = function(*args, **options)
                result = list(result) if is_iterator else result
                if np.any(result) if isinstance(result, np.ndarray) else result:
                    fired.add(name)
                return iter(result) if is_iterator else result

            return call

        return make

    with contextlib.ExitStack() as stack:
        for mechanism in mechanisms():
            stack.enter_context(replaced(mechanism, recording(mechanism.name)))
        redetect(history, detectors())
    return fired


def compare(name: str, case: Case, before: Judgement, after: Judgement) -> Effect:
    """Return what an ablation changed in the judgement of one case."""
    is_healthy, nothing = case.fault is None, frozenset[str]()
    changes = {
        "runs": True,
        "lost": before.is_found and not after.is_found,
        "lost_first": before.is_right_first and not after.is_right_first,
        "lost_layer": bool(before.is_layer_named) and not after.is_layer_named,
        "later": (after.steps_to_detection or 0) > (before.steps_to_detection or 0),
        "prevented": is_healthy and bool(after.wrong_kinds) and not before.wrong_kinds,
        "alarms": is_healthy and bool(before.wrong_kinds) and not after.wrong_kinds,
        "gained": (after.is_found, after.is_right_first) > (before.is_found, before.is_right_first),
    }
    return Effect(**{column: frozenset({name}) if has else nothing for column, has in changes.items()})


@dataclass(frozen=True)
class AblatedRun:
    """One kept run: its judgement, whether that equals the judgement of the live run, and the effects by mechanism."""

    set: str
    case: str
    fault: str | None
    judgement: Judgement
    is_as_live: bool
    effects: dict[str, Effect]


def ablate_run(run: Path) -> AblatedRun:
    """Switch off each mechanism that is at work in a kept run."""
    set_name, case_name = run.parts[-2:]
    case = next(case for case in load_set(set_name) if case.name == case_name)
    history, name = read(run), f"{set_name}/{case_name}"
    live = judge(case, _as_zoo(history.findings))
    findings = detect(history)
    before, at_work = judge(case, findings), fired_in(history)
    at_work |= {f.kind for f in findings} | {f"event: {event.kind}" for event in history.events}
    effects = {
        mechanism.name: compare(name, case, before, judge(case, detect(history, without=mechanism)))
        for mechanism in mechanisms()
        if mechanism.name in at_work
    }
    return AblatedRun(set_name, case_name, case.fault, before, live == before, effects)


def ablate(folder: Path, *, jobs: int = 1) -> list[AblatedRun]:
    """Return each kept run with the effects of the mechanisms that are at work in it."""
    kept = [folder / name / case.name for name in SETS for case in load_set(name)]
    runs = [run for run in kept if run.is_dir()]
    if jobs == 1:
        return [ablate_run(run) for run in runs]
    with ProcessPoolExecutor(jobs) as pool:
        return list(pool.map(ablate_run, runs))


def sum_effects(runs: Sequence[AblatedRun]) -> dict[Mechanism, Effect]:
    """Return the effect of each mechanism over all runs, those that carry least first."""
    effects = {
        mechanism: functools.reduce(
            Effect.__or__, (run.effects[mechanism.name] for run in runs if mechanism.name in run.effects), Effect()
        )
        for mechanism in mechanisms()
    }
    return dict(sorted(effects.items(), key=lambda item: item[1].weight))


def reason_for(name: str, kept: dict[str, str]) -> str:
    """Return why a mechanism stays, by the first pattern that matches its name, or an empty text."""
    return next((reason for pattern, reason in kept.items() if fnmatch.fnmatchcase(name, pattern)), "")


def find_mistakes(effects: dict[Mechanism, Effect], kept: dict[str, str]) -> list[str]:
    """Return what is wrong with the reasons: they name nothing, are not needed, or are missing."""
    idle = [mechanism.name for mechanism, effect in effects.items() if effect.is_idle]
    return [
        *(f"{pattern}: nothing without weight has this name" for pattern in kept if not fnmatch.filter(idle, pattern)),
        *(f"{name}: it carries no weight, and has no reason" for name in idle if not reason_for(name, kept)),
    ]


COLUMNS = (
    "mechanism",
    "lines",
    "runs",
    "only it finds",
    "right first",
    "layer",
    "sooner",
    "alarms only it makes",
    "alarms it prevents",
    "why it stays",
)


def format_table(effects: dict[Mechanism, Effect], kept: dict[str, str]) -> str:
    """Return a line per mechanism, those that carry least first."""
    lines = [COLUMNS, ("---",) * len(COLUMNS)]
    for mechanism, effect in effects.items():
        counts = (effect.runs, effect.lost, effect.lost_first, effect.lost_layer, effect.later, effect.alarms)
        cells = [str(len(cases) or "") for cases in (*counts, effect.prevented)]
        reason = reason_for(mechanism.name, kept) if effect.is_idle else ""
        lines.append((mechanism.name, str(mechanism.lines or ""), *cells, reason))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def format_cases(effects: dict[Mechanism, Effect]) -> str:
    """Return a line per mechanism that alone finds a fault, makes an alarm or prevents one, with the cases."""
    lines = []
    for mechanism, effect in sorted(effects.items(), key=lambda item: item[0].name):
        named = {"finds": effect.lost, "alarms": effect.alarms, "prevents": effect.prevented}
        parts = [f"{verb} {', '.join(sorted(cases))}" for verb, cases in named.items() if cases]
        lines += [f"- {mechanism.name}: {'; '.join(parts)}"] if parts else []
    return "\n".join(lines)


PAGE = """# What each mechanism carries

<!-- Written by `scripts/studies/ablation.py`. -->

Each mechanism of the detectors is switched off in turn, and the kept runs of the fault zoo are judged again. Detection
is repeated on the stored rows and events, so nothing is trained again.

A mechanism without weight here may still be the only one for a fault that these scripts do not have. Before it goes,
plant its fault in other models, optimizers and batch sizes, and compare. That kept the rules on batches of one class,
on loops that stop clearing their gradients and on factorization machines: of 25 such loops, 22 are found by nothing
else. Of 84 planted decays, `find_collapsed_weights` finds 10 sooner than anything else, and one alone. Of 84 planted
learning rates, `find_diverging_loss` finds 5 alone. Reasons that say "planted" rest on small loops of this kind.

```console
python -m scripts.fault_zoo {sets} --keep runs/zoo
{command}
```

Written on {day}, from tree `{tree}` and {runs} kept runs: {faulty} with a fault ({found} found) and
{healthy} healthy ones ({alarms} with an alarm). The stored rows give the judgement of the live run, except in
{differing} runs: long ones are thinned on disk, and the detectors may be newer than a run.

## Each mechanism

A mechanism is a function of a detector, a whole detector, or a kind of event that detectors read. `runs` counts the
runs in which it is at work. The other columns count the cases that change without it: faults that are no longer found,
first kinds and layers that are no longer right, faults that are found later, and healthy runs that lose or get an
alarm. A detector has the lines of its file and of its rules; a function has its own, and those that nothing else uses.

{table}

## The cases

{cases}
"""


def make_page(runs: Sequence[AblatedRun], kept: dict[str, str], command: str) -> str:
    """Return the page with the table of all mechanisms."""
    effects = sum_effects(runs)
    tree = ("git", "-C", str(REPOSITORY), "rev-parse", "--short", "HEAD")
    alarms = sum(run.fault is None and bool(run.judgement.wrong_kinds) for run in runs)
    return PAGE.format(
        sets=" ".join(f"--set {name}" for name in dict.fromkeys(run.set for run in runs)),
        command=command,
        day=f"{datetime.now(UTC):%d %B %Y}",
        tree=subprocess.run(tree, capture_output=True, text=True, check=True).stdout.strip(),
        runs=len(runs),
        faulty=sum(run.fault is not None for run in runs),
        found=sum(run.judgement.is_found for run in runs),
        healthy=sum(run.fault is None for run in runs),
        alarms=alarms,
        differing=sum(not run.is_as_live for run in runs),
        table=format_table(effects, kept),
        cases=format_cases(effects),
    )


def main() -> int:
    """Print the table, or write the page; say which mechanisms need a reason to stay."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of kept runs, as SET/CASE")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time (default: 1)")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the page of the documentation")
    options = parser.parse_args()
    kept: dict[str, str] = yaml.safe_load(KEPT.read_text(encoding="utf-8"))
    runs = ablate(options.folder, jobs=options.jobs)
    if options.page:
        arguments = f"runs/zoo --page {options.page}"
        options.page.write_text(make_page(runs, kept, f"python scripts/studies/ablation.py {arguments}"))
    else:
        effects = sum_effects(runs)
        print(format_table(effects, kept), format_cases(effects), sep="\n\n")
    mistakes = find_mistakes(sum_effects(runs), kept)
    print(*mistakes, sep="\n", file=sys.stderr)
    return 1 if mistakes else 0


if __name__ == "__main__":
    sys.exit(main())
