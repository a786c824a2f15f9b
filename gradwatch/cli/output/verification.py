"""How proofs, a cure and a tried change look in a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradwatch.cli.output.bad_operation import Row, grid, located_rows
from gradwatch.records import Severity
from gradwatch.render.common import format as units
from gradwatch.render.common.style import OK, SEVERITY

if TYPE_CHECKING:
    from gradwatch.replay.cure import Cure
    from gradwatch.replay.trials.ab_test import Attempt, Pair
    from gradwatch.replay.verify.result import Check, Proof

CODE = "#0087af"
STATUS = {"confirmed": OK, "refuted": "dim", "open": SEVERITY[Severity.WARNING]}


def print_proofs(console: Console, proofs: Sequence[Proof]) -> None:
    """Print what became of each diagnosis, with the numbers."""
    for proof in proofs:
        finding = proof.finding
        where = f" in {finding.layer}" if finding.layer else ""
        console.print()
        console.print(Text.assemble((f"proof of {finding.kind}", "bold"), f"{where}, step {finding.step:,}"))
        console.print(grid(_proof(proof)))


def print_cure(console: Console, cure: Cure | None, text: str, *, path: Path | None) -> None:
    """Print a cure and how it was shown to work, or that there is none.

    Args:
        console: Where to.
        cure: What was found, or None.
        text: The same as YAML.
        path: Where it was written, or None.
    """
    console.print()
    if cure is None:
        console.print("no cure: no change that the config can express was confirmed")
        return
    state = "healthy" if not cure.left else f"still {', '.join(cure.left)}"
    told = Text.assemble(("cure", "bold"), f"  {cure.steps:,} steps with it: ")
    told.append(state, OK if not cure.left else SEVERITY[Severity.WARNING])
    told.append(f", final loss {_loss(cure.before)} -> {_loss(cure.after)}")
    if not math.isnan(cure.accuracy):
        told.append(f", validation accuracy {units.percent(cure.accuracy)}")
    console.print(told)
    lines = [line for line in text.splitlines() if not line.startswith("# ")]
    console.print(grid([("", Text("\n".join(lines), CODE))]))
    if path:
        console.print(f"written to {path}")


def print_attempt(console: Console, attempt: Attempt) -> None:
    """Print two configs side by side, seed by seed, and what it comes to."""
    seeds = f"{len(attempt.pairs)} seed{'s' if len(attempt.pairs) > 1 else ''}"
    console.print()
    console.print(Text.assemble(("tried", "bold"), f"  {attempt.steps:,} steps from {seeds}, as it was and changed"))
    table = Table.grid(padding=(0, 2, 0, 0))
    for title in ("seed", "loss", "val. accuracy", "findings"):
        table.add_column(Text(title, "dim"), overflow="fold")
    table.add_row(*(Text(t, "dim") for t in ("seed", "final loss", "val. accuracy", "findings")))
    for pair in attempt.pairs:
        table.add_row(str(pair.seed), *_pair(pair))
    console.print(table)
    for sentence in conclusions(attempt):
        console.print(sentence)


def conclusions(attempt: Attempt) -> Iterator[str]:
    """Yield what a tried change comes to: is the finding gone, is it better, by how much."""
    for kind, (seeds, gone) in attempt.gone.items():
        yield f"{kind}: gone in {gone} of {seeds}"
    if not attempt.gone:
        yield "the old config made no finding in these steps"
    for kind, seeds in attempt.came.items():
        yield f"{kind}: new in {seeds} of {len(attempt.pairs)}"
    measure = "final loss" if attempt.same_loss else "validation accuracy (the loss is another one)"
    yield f"{measure}: better in {attempt.better} of {len(attempt.pairs)}{_gain(attempt)}"


def _gain(attempt: Attempt) -> str:
    """Return by how much the loss is better, in the middle of the seeds, where both can be compared."""
    pairs = [p for p in attempt.pairs if attempt.same_loss and math.isfinite(p.old.loss) and math.isfinite(p.new.loss)]
    if not pairs:
        return ""
    gains = sorted(p.old.loss - p.new.loss for p in pairs)
    low, high = gains[0], gains[-1]
    between = f" (between {low:+.3g} and {high:+.3g})" if len(gains) > 1 else ""
    return f", lower by {gains[len(gains) // 2]:.3g}{between}"


def _pair(pair: Pair) -> Iterator[str]:
    yield f"{_loss(pair.old.loss)} -> {_loss(pair.new.loss)}"
    yield f"{units.percent(pair.old.val_accuracy)} -> {units.percent(pair.new.val_accuracy)}"
    old, new = ({f.kind for f in made.alarms} for made in (pair.old, pair.new))
    yield f"{', '.join(sorted(old)) or 'none'} -> {', '.join(sorted(new)) or 'none'}"


def _proof(proof: Proof) -> Iterator[Row]:
    yield "unchanged", proof.control
    if not proof.comes_back:
        yield "", Text("it does not come back, so that nothing can be proved by its absence", STATUS["open"])
    if proof.located:
        yield "first bad", Text(proof.located.title, "bold")
        yield from located_rows(proof.located, None, brief=True)
    if proof.sorted:
        yield "depends", proof.sorted
    for tested in proof.causes:
        yield tested.status, Text(tested.cause, STATUS[tested.status])
        if not tested.checks:
            yield "", "nothing that can be changed here speaks for or against it"
        for check in tested.checks:
            yield "", _check(check)
    for i, check in enumerate(proof.further):
        yield "" if i else "also", _check(check)
    yield "", Text(f"in {units.duration(proof.seconds)}", "dim")


def _check(check: Check) -> Text:
    words = {True: ("gone", OK), False: ("stays", SEVERITY[Severity.WARNING]), None: ("untold", "dim")}
    word, style = words[check.gone]
    return Text.assemble((f"{word:<6} ", style), f"{check.text}: ", (check.result, "dim"))


def _loss(loss: float) -> str:
    return units.value(loss)
