"""Compare `gradwatch check` with torch's gradcheck on planted mistakes: `python scripts/benchmarks/benchmark_check.py`.

The cases are in tests/gradient_cases.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from gradwatch.gradcheck.check import run_check

CASES = Path(__file__).parents[2] / "tests"
NEAR = 2
"""Lines by which a named line may be off."""


@dataclass
class Answer:
    """What a checker said of a case."""

    case: str
    truth: str | None
    said: bool
    located: bool
    line: bool
    kind: bool
    seconds: float
    text: str


def is_step(built: tuple[Any, Any, Any]) -> bool:
    """Return whether a case is a step and not a module with its loss."""
    return not isinstance(built[0], nn.Module)


def by_gradwatch(case: Any) -> Answer:
    """Check a case with gradwatch."""
    built = case.build()
    begin = time.perf_counter()
    if is_step(built):
        step, model, batch = built
        found = run_check(lambda given: step(model, given), (batch,), model=model, functions=(step,))
    else:
        module, inputs, loss = built
        found = run_check(lambda *given: loss(module(*given)), tuple(inputs), model=module, functions=(loss, module))
    seconds = time.perf_counter() - begin
    first = found.faults[0] if found.faults else None
    is_near = (
        first is not None
        and Path(first.place.file).name == Path(case.file).name
        and abs(first.place.line - case.line) <= NEAR
    )
    return Answer(
        case=case.name,
        truth=case.kind,
        said=found.is_wrong,
        located=first is not None and first.where in case.where,
        line=is_near,
        kind=first is not None and first.kind == case.kind,
        seconds=seconds,
        text="; ".join(f"{f.kind} {f.where} {f.place}" for f in found.faults),
    )


def by_gradcheck(case: Any) -> Answer:
    """Check a case with torch.autograd.gradcheck in float64, as its documentation says; it has no form for a step."""
    built = case.build()
    begin = time.perf_counter()
    said, text = False, ""
    if is_step(built):
        text = "cannot be asked"
    else:
        module, inputs, loss = built
        module = module.double()
        given = tuple(t.double() if t.is_floating_point() else t for t in inputs)
        given = tuple(g.detach().requires_grad_(t.requires_grad) for g, t in zip(given, inputs, strict=True))
        params = {n: p for n, p in module.named_parameters() if p.requires_grad}

        def function(*values: torch.Tensor) -> Any:
            named = dict(zip(params, values[: len(params)], strict=True))
            return loss(functional_call(module, named, values[len(params) :]))

        try:
            said = not torch.autograd.gradcheck(function, (*params.values(), *given), raise_exception=True)
        except Exception as error:  # a failure of any kind is its answer
            said, text = True, str(error).splitlines()[0][:80]
    seconds = time.perf_counter() - begin
    return Answer(case.name, case.kind, said, located=False, line=False, kind=False, seconds=seconds, text=text)


def summary(answers: list[Answer]) -> dict[str, str]:
    """Return the figures of the table."""
    wrong, right = [a for a in answers if a.truth], [a for a in answers if not a.truth]
    seconds = sorted(a.seconds for a in answers)

    def share(hits: int, of: list[Answer]) -> str:
        return f"{hits} of {len(of)}"

    return {
        "wrong found": share(sum(a.said for a in wrong), wrong),
        "place named": share(sum(a.said and a.located for a in wrong), wrong),
        "line within 2": share(sum(a.said and a.line for a in wrong), wrong),
        "kind named": share(sum(a.said and a.kind for a in wrong), wrong),
        "right ones failed": share(sum(a.said for a in right), right),
        "median s": f"{seconds[len(seconds) // 2]:.2f}",
        "longest s": f"{seconds[-1]:.1f}",
    }


def main() -> None:
    """Print one line per case, and the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", nargs="?", default="", help="part of the names of the cases to run")
    parser.add_argument("--json", type=Path, help="file for all answers")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    tools: dict[str, Callable[[Any], Answer]] = {"gradwatch": by_gradwatch, "gradcheck": by_gradcheck}
    answers: dict[str, list[Answer]] = {tool: [] for tool in tools}
    sys.path.insert(0, str(CASES))
    for case in importlib.import_module("gradient_cases.every_case").CASES:
        if options.part not in case.name:
            continue
        for tool, ask in tools.items():
            try:
                answer = ask(case)
            except Exception as error:  # a checker that falls over has answered wrongly
                answer = Answer(
                    case.name, case.kind, not case.kind, False, False, False, 0.0, f"{type(error).__name__}: {error}"
                )
            answers[tool].append(answer)
            marks = " ".join(word for word in ("located", "line", "kind") if case.kind and getattr(answer, word))
            is_right = answer.said == bool(case.kind)
            print(
                f"{'ok' if is_right else 'NO':2} {tool:9} {case.name:44} {case.kind or '-':14} {answer.seconds:6.2f} s "
                f"{marks:18} {answer.text}",
                flush=True,
            )
    figures = {tool: summary(found) for tool, found in answers.items()}
    rows = list(next(iter(figures.values())))
    print(f"\n| | {' | '.join(figures)} |\n|---|{'---|' * len(figures)}")
    for row in rows:
        print(f"| {row} | {' | '.join(f[row] for f in figures.values())} |")
    if options.json:
        options.json.write_text(json.dumps({t: [asdict(a) for a in found] for t, found in answers.items()}, indent=1))


if __name__ == "__main__":
    main()
