"""Print verified causes, a cure, and a change compared with the original config."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradwatch.cli.output.bad_operation import Row, grid, styled_rows
from gradwatch.records import Severity
from gradwatch.render.common import format as units
from gradwatch.render.common.style import CODE, OK, SEVERITY

if TYPE_CHECKING:
    from gradwatch.replay.cure import Cure
    from gradwatch.replay.trials.ab_test import ConfigComparison, SeedPair
    from gradwatch.replay.verify.result import Experiment, Verification

STATUS = {"confirmed": OK, "refuted": "dim", "open": SEVERITY[Severity.WARNING]}


def print_verifications(console: Console, verifications: Sequence[Verification]) -> None:
    """Print whether each diagnosis was confirmed, with the numbers."""
    for verification in verifications:
        finding = verification.finding
        console.print()
        console.print(Text.assemble(("verification of ", "bold"), finding.life))
        console.print(grid(_verification_rows(verification)))


def print_cure(console: Console, cure: Cure | None, text: str, *, path: Path | None) -> None:
    """Print a cure and its effect, or that there is none.

    Args:
        console: Console to print to.
        cure: The cure, or None.
        text: The cure as YAML.
        path: File with the written cure, or None.
    """
    console.print()
    if cure is None:
        console.print("no cure: no change of the config is confirmed to fix the run")
        return
    state = "healthy" if not cure.left else f"still {', '.join(cure.left)}"
    line = Text.assemble(("cure", "bold"), f"  {cure.steps:,} steps with it: ")
    line.append(state, OK if not cure.left else SEVERITY[Severity.WARNING])
    line.append(f", final loss {units.value(cure.before)} -> {units.value(cure.after)}")
    if not math.isnan(cure.accuracy):
        line.append(f", validation accuracy {units.percent(cure.accuracy)}")
    console.print(line)
    # the comments are for the file; here, the lines above say the same
    lines = [line for line in text.splitlines() if not line.startswith("# ")]
    console.print(grid([("", Text("\n".join(lines), CODE))]))
    if path:
        console.print(f"written to {path}")


def print_comparison(console: Console, comparison: ConfigComparison) -> None:
    """Print two configs side by side, seed by seed, and the conclusions."""
    text = (
        f"  {comparison.steps:,} steps with {units.plural(len(comparison.pairs), 'seed')}, without and with the change"
    )
    console.print()
    console.print(Text.assemble(("compared", "bold"), text))
    table = Table.grid(padding=(0, 2, 0, 0))
    titles = ("seed", "final loss", "val. accuracy", "findings")
    for _ in titles:
        table.add_column(overflow="fold")
    table.add_row(*(Text(title, "dim") for title in titles))
    for pair in comparison.pairs:
        table.add_row(str(pair.seed), *_pair(pair))
    console.print(table)
    for sentence in conclusions(comparison):
        console.print(sentence)


def conclusions(comparison: ConfigComparison) -> Iterator[str]:
    """Yield the conclusions about a change: whether the findings are gone, and how much better the loss is."""
    of_all = f"of {units.plural(len(comparison.pairs), 'seed')}"
    for kind, (seeds, gone) in comparison.resolved.items():
        yield f"{kind}: gone with {gone} of {units.plural(seeds, 'seed')}"
    if not comparison.resolved:
        yield "the original config had no finding in these steps"
    for kind, seeds in comparison.introduced.items():
        yield f"{kind}: new with {seeds} {of_all}"
    measure = "final loss" if comparison.same_loss else "validation accuracy (the loss functions differ)"
    yield f"{measure}: better with {comparison.better} {of_all}{_gain(comparison)}"


def _gain(comparison: ConfigComparison) -> str:
    """Return by how much the loss is lower, as the median over the seeds with finite losses."""
    # losses of two different loss functions cannot be compared
    pairs = [
        p for p in comparison.pairs if comparison.same_loss and math.isfinite(p.old.loss) and math.isfinite(p.new.loss)
    ]
    if not pairs:
        return ""
    gains = sorted(p.old.loss - p.new.loss for p in pairs)
    low, high = gains[0], gains[-1]
    between = f" (between {low:+.3g} and {high:+.3g})" if len(gains) > 1 else ""
    return f", lower by {gains[len(gains) // 2]:.3g}{between}"


def _pair(pair: SeedPair) -> Iterator[str]:
    yield f"{units.value(pair.old.loss)} -> {units.value(pair.new.loss)}"
    yield f"{units.percent(pair.old.val_accuracy)} -> {units.percent(pair.new.val_accuracy)}"
    old, new = ({f.kind for f in made.alarms} for made in (pair.old, pair.new))
    yield f"{', '.join(sorted(old)) or 'none'} -> {', '.join(sorted(new)) or 'none'}"


def _verification_rows(verification: Verification) -> Iterator[Row]:
    yield "unchanged", verification.control
    if not verification.reproduced:
        yield "", Text("the symptom did not reproduce, so nothing can be verified", STATUS["open"])
    if verification.located:
        yield "first bad", Text(verification.located.title, "bold")
        yield from styled_rows(verification.located, None, brief=True)
    if verification.dependence:
        yield "depends", verification.dependence
    for tested in verification.causes:
        yield tested.status, Text(tested.cause, STATUS[tested.status])
        if not tested.experiments:
            yield "", "no experiment can confirm or refute it"
        for experiment in tested.experiments:
            yield "", _experiment(experiment)
    for i, experiment in enumerate(verification.other_experiments):
        yield "" if i else "also", _experiment(experiment)
    yield "", Text(f"in {units.duration(verification.seconds)}", "dim")


def _experiment(experiment: Experiment) -> Text:
    words = {True: ("gone", OK), False: ("stays", SEVERITY[Severity.WARNING]), None: ("inconclusive", "dim")}
    word, style = words[experiment.gone]
    return Text.assemble((f"{word:<12} ", style), f"{experiment.text}: ", (experiment.result, "dim"))
