"""Ablate the mechanisms of the detectors: switch each off in turn, and judge the kept runs of the fault zoo again.

    python -m scripts.fault_zoo --set dev --set opened --set published --keep runs/zoo
    python scripts/studies/ablation.py runs/zoo

A mechanism is a function that a detector imports from its `*_rules` package and that returns signs, a whole detector,
or a kind of event. Detection is repeated on the stored rows and events, so nothing is trained again. Judged are the
same counts as in the zoo's table: a mechanism carries weight if a fault, a first kind or a layer is lost without it.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

REPOSITORY = Path(__file__).parents[2]
sys.path.insert(0, str(REPOSITORY))

from gradwatch.detect import Detector, detector_classes, detectors  # noqa: E402
from gradwatch.history.disk.writer import read  # noqa: E402
from gradwatch.history.store import History  # noqa: E402
from gradwatch.pipeline.redetect import redetect  # noqa: E402
from scripts.fault_zoo.case_sets import SETS, load_set  # noqa: E402
from scripts.fault_zoo.judge import Judgement, judge  # noqa: E402
from scripts.fault_zoo.protocol import Case  # noqa: E402
from scripts.fault_zoo.protocol import Finding as ZooFinding  # noqa: E402

SIGN_RETURNS = ("Sign", "Finding")
"""Names in the return annotation of a mechanism."""


@dataclass(frozen=True)
class Mechanism:
    """Something that can be switched off.

    Attributes:
        name: `kind: function`, `kind`, or `event: kind`.
        lines: Lines of code that would go with it; 0 if they are not counted.
        module: Module whose name is replaced, or None.
        function: The name that is replaced.
        kind: Kind of the detector that is left out, or None.
        event: Kind of the events that are left out, or None.
    """

    name: str
    lines: int = 0
    module: ModuleType | None = None
    function: str = ""
    kind: str | None = None
    event: str | None = None


@dataclass
class Effect:
    """The cases that change without one mechanism."""

    fired: set[str] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)
    lost_first: set[str] = field(default_factory=set)
    lost_layer: set[str] = field(default_factory=set)
    later: set[str] = field(default_factory=set)
    alarms: set[str] = field(default_factory=set)
    gained: set[str] = field(default_factory=set)

    @property
    def columns(self) -> tuple[set[str], ...]:
        """The cases of each column of the table."""
        return (self.fired, self.lost, self.lost_first, self.lost_layer, self.later, self.alarms, self.gained)

    @property
    def weight(self) -> tuple[int, ...]:
        """What is lost without the mechanism, the worst loss first."""
        return (len(self.lost), len(self.lost_first), len(self.lost_layer), len(self.later), len(self.fired))


def find_functions() -> Iterator[Mechanism]:
    """Yield the functions that detectors import from their rules."""
    for cls in detector_classes():
        module = sys.modules[cls.__module__]
        for name, value in sorted(vars(module).items()):
            is_rule = isinstance(value, FunctionType) and value.__module__.startswith(f"{module.__name__}_rules.")
            if is_rule and any(word in str(inspect.signature(value).return_annotation) for word in SIGN_RETURNS):
                yield Mechanism(f"{cls.kind}: {name}", _code_lines(value), module, name)


def _code_lines(function: FunctionType) -> int:
    """Count the lines of a function's module that hold statements."""
    tree = ast.parse(Path(inspect.getfile(function)).read_text(encoding="utf-8"))
    return len({node.lineno for node in ast.walk(tree) if isinstance(node, ast.stmt)})


@contextlib.contextmanager
def replaced(mechanism: Mechanism, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Replace a function while the context is open."""
    assert mechanism.module is not None, f"{mechanism.name} is no function"
    original = getattr(mechanism.module, mechanism.function)
    setattr(mechanism.module, mechanism.function, make(original))
    try:
        yield
    finally:
        setattr(mechanism.module, mechanism.function, original)


def silent(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that sees nothing."""
    returns = str(inspect.signature(function).return_annotation)
    if returns.startswith("Iterator"):
        return lambda *_, **__: iter(())
    if returns.startswith(("list", "tuple")):
        return lambda *_, **__: []
    return lambda *_, **__: None


def detect(history: History, *, without: Mechanism | None = None) -> list[ZooFinding]:
    """Return the findings in a run."""
    asked: Sequence[Detector] = detectors()
    context: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    events = list(history.events)
    if without is not None:
        if without.module:
            context = replaced(without, silent)
        asked = [d for d in asked if d.kind != without.kind]
        history.events[:] = [e for e in events if e.kind != without.event]
    try:
        with context:
            found = redetect(history, asked).findings
    finally:
        history.events[:] = events
    return [ZooFinding(f.kind, layer, f.step, str(f.severity)) for f in found for layer in f.names or (None,)]


def fired_in(history: History, functions: Sequence[Mechanism]) -> set[str]:
    """Return the names of the functions that saw something in a run."""
    fired: set[str] = set()

    def recording(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def make(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                result = function(*args, **kwargs)
                if result is None:
                    return None
                several = list(result) if not hasattr(result, "message") else None
                if several is None or any(several):
                    fired.add(name)
                return result if several is None else several

            return call

        return make

    with contextlib.ExitStack() as stack:
        for mechanism in functions:
            stack.enter_context(replaced(mechanism, recording(mechanism.name)))
        redetect(history, detectors())
    return fired


def compare(effect: Effect, name: str, case: Case, before: Judgement, after: Judgement) -> None:
    """Note what an ablation changed in the judgement of one case."""
    effect.fired.add(name)
    for kept, lost, into in (
        (after.is_found, before.is_found, effect.lost),
        (after.is_right_first, before.is_right_first, effect.lost_first),
        (bool(after.is_layer_named), bool(before.is_layer_named), effect.lost_layer),
        (before.is_found or before.is_right_first, after.is_found or after.is_right_first, effect.gained),
    ):
        if lost and not kept:
            into.add(name)
    if (after.steps_to_detection or 0) > (before.steps_to_detection or 0):
        effect.later.add(name)
    if case.fault is None and before.wrong_kinds and not after.wrong_kinds:
        effect.alarms.add(name)


def ablate(folder: Path) -> dict[Mechanism, Effect]:
    """Return the effect of each mechanism that is at work in the kept runs."""
    functions = list(find_functions())
    kinds = [Mechanism(cls.kind, kind=cls.kind) for cls in detector_classes()]
    effects: dict[Mechanism, Effect] = {mechanism: Effect() for mechanism in (*functions, *kinds)}
    for set_name in SETS:
        for case in load_set(set_name):
            run = folder / set_name / case.name
            if not run.is_dir():
                continue
            history, name = read(run), f"{set_name}/{case.name}"
            findings = detect(history)
            before, fired = judge(case, findings), fired_in(history, functions)
            seen = {finding.kind for finding in findings}
            events = [Mechanism(f"event: {kind}", event=kind) for kind in {event.kind for event in history.events}]
            at_work = [m for m in functions if m.name in fired] + [m for m in kinds if m.kind in seen] + events
            for mechanism in at_work:
                after = judge(case, detect(history, without=mechanism))
                compare(effects.setdefault(mechanism, Effect()), name, case, before, after)
    return effects


def main() -> None:
    """Print a line per mechanism, those that carry least first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of kept runs, as SET/CASE")
    parser.add_argument("--cases", action="store_true", help="name the cases behind each count")
    options = parser.parse_args()
    print("| mechanism | lines | runs | only it finds | right first | layer | sooner | its alarms | hides |")
    print("|---|---|---|---|---|---|---|---|---|")
    effects = ablate(options.folder)
    for mechanism, effect in sorted(effects.items(), key=lambda item: item[1].weight):
        counts = " | ".join(str(len(cases)) for cases in effect.columns)
        print(f"| {mechanism.name} | {mechanism.lines or ''} | {counts} |")
        if options.cases:
            print(*(f"  {sorted(cases)}" for cases in effect.columns[1:] if cases), sep="\n")


if __name__ == "__main__":
    main()
