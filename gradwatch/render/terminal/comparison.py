"""Show two runs side by side: text for people, and JSON for programs.

The JSON, version 1. Within a version, keys may be added, but no key is removed or changes its meaning. A number that is
NaN or infinite is null.

    version     1
    same        "bits", "rounding" or "no": how closely the histories agree at the steps that both keep
    steps       number of steps that both keep
    tolerance   relative difference that counts as rounding
    parting     {bits, rounding}: null, or {step, statistic, layer, first, second, others} of the first difference
    settings    {key: [first, second]} of the settings that differ in config or environment; null if one lacks the key
    runs        [first, second], each {name, verdict, facts, findings}, as in `gradwatch diagnose --format json`
    layers      list of {layer, decades, spread}, largest difference of the gradients first
    only        [first, second]: parameter tensors that the other run lacks
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from gradwatch.history.compare import Comparison, FirstDifference, GradientGap
from gradwatch.history.store import History
from gradwatch.records import Finding
from gradwatch.render.common import format as units
from gradwatch.render.common.config_patch import flat
from gradwatch.render.common.run_stats import RunStats, is_judged, run_stats, verdict, watching, worst_severity
from gradwatch.render.common.sparkline import Glyphs, glyphs, sparkline
from gradwatch.render.common.style import OK, SEVERITY, mark
from gradwatch.render.json_document import UNKNOWN, strict, word

VERSION = 1
NAMES = ("A", "B")
Settings = Mapping[str, tuple[Any, Any]]

OWN = ("run.name", "run.out")
"""Settings that always differ between two runs, so they are not compared."""
MAX_LISTED = 8
"""Maximum number of layers, and of findings per group, that are listed."""
MIN_DECADES = 0.05
"""Minimum difference of a layer's gradients, in powers of ten, that is listed: a factor of 1.12, about 1/8."""
# the first match wins; a statistic that starts with the key has the reason
REASONS = (
    ("batch_hash", "the batches differ: another seed, order of the data, or augmentation"),
    ("lr.", "the learning rates differ"),
    ("grad_norm.after_clip", "the gradients are clipped differently"),
    ("loss_scale", "the losses are scaled differently"),
    ("weight.l2", "the weights differ: another seed, initialization or model, or an earlier update that was not saved"),
)


def settings(first: History, second: History, configs: tuple[Mapping[str, Any], Mapping[str, Any]]) -> Settings:
    """Return the settings in which two runs differ, in config or environment, by dotted key.

    Args:
        first: First run.
        second: Second run.
        configs: Contents of the two config files; empty for a run without a config.
    """
    flattened = [flat(config) for config in configs]
    for one, history in zip(flattened, (first, second), strict=True):
        info = history.info
        # the environment is in no config
        one |= {"device": info.device, **{f"versions.{name}": version for name, version in info.versions.items()}}
        if not all(configs):  # the config states them too, under other keys
            one |= {"optimizer": info.optimizer, "precision": info.precision, "accumulate": info.accumulate}
    # dict.fromkeys: no key twice, in the order of the configs
    keys = [key for key in dict.fromkeys((*flattened[0], *flattened[1])) if key not in OWN]
    return {key: (a, b) for key in keys if (a := flattened[0].get(key)) != (b := flattened[1].get(key))}


def dumps(found: Comparison, runs: tuple[History, History], changed: Settings) -> str:
    """Return a comparison as one JSON document, in the format that the module docstring describes."""
    data = {
        "version": VERSION,
        # without common steps, nothing shows that the runs are the same
        "same": "no" if found.rounding or not found.steps else "rounding" if found.bits else "bits",
        "steps": found.steps,
        "tolerance": found.tolerance,
        "parting": {"bits": found.bits and asdict(found.bits), "rounding": found.rounding and asdict(found.rounding)},
        "settings": changed,
        "runs": [_plain(run) for run in runs],
        "layers": [asdict(gap) for gap in found.gaps],
        "only": [found.only_first, found.only_second],
    }
    return json.dumps(strict(data), indent=2, allow_nan=False)


def print_comparison(console: Console, found: Comparison, runs: tuple[History, History], changed: Settings) -> None:
    """Print two runs side by side: first difference and its likely reason, outcome, settings, layers, findings."""
    signs = glyphs(console)
    for line in _differences(found, signs):
        console.print(line)
    console.print()
    console.print(_outcome(runs, signs, console.width))
    parts = (
        (_title("settings that differ", len(changed)), _settings(changed) if changed else None),
        (_title("layers whose gradients differ most"), _layers(found, runs, signs, console.width)),
        (_title("findings"), _findings(runs, signs)),
    )
    for title, part in parts:
        if part:
            console.print()
            console.print(title)
            console.print(Padding(part, (0, 0, 0, 2)))


def _differences(found: Comparison, signs: Glyphs) -> Iterator[Text]:
    count = units.plural(found.steps, "step")
    limit = f"rounding ({units.number(found.tolerance, digits=2)} relative)"
    if not found.steps:
        yield Text("the runs have no recorded step in common", "bold")
    elif found.bits is None:
        yield Text.assemble((signs.ok, OK), (" bit-identical", "bold"), f", at all {count} that both recorded")
    elif found.rounding is None:
        yield Text.assemble((signs.ok, OK), (" equal up to rounding", "bold"), f", at all {count} that both recorded")
        yield Text.assemble("  bits first differ at ", _where(found.bits), f"; nothing differs beyond {limit}")
    else:
        yield Text.assemble((signs.onset, "bold"), (f" the runs diverge at step {found.rounding.step:,}", "bold"))
        yield Text.assemble("  beyond ", limit, " first at ", _where(found.rounding))
        reason = next((text for name, text in REASONS if found.rounding.statistic.startswith(name)), None)
        if reason:
            yield Text(f"  {reason}")
        # the divergence may have grown from rounding differences: show where they begin
        if found.bits and found.bits.step < found.rounding.step:
            yield Text.assemble("  bits differ already at ", _where(found.bits))
        elif found.rounding.step:  # before step 0, there is nothing to compare
            yield Text("  bit-identical before that step")


def _where(parting: FirstDifference) -> Text:
    text = Text.assemble((f"step {parting.step:,}", "bold"), f" in {parting.statistic}")
    if parting.layer:
        text.append(f" of {parting.layer}")
    if parting.statistic != "batch_hash":  # a hash is a number without meaning
        a, b = _apart(parting.first, parting.second)
        text.append(f": {a} in A, {b} in B")
    return text.append(f"; {units.plural(parting.others, 'other number')} as well" if parting.others else "")


def _apart(first: float, second: float) -> tuple[str, str]:
    for digits in range(3, 17):  # 16 digits separate nearly all float64, and `repr` the rest
        shown = (f"{first:.{digits}g}", f"{second:.{digits}g}")
        if shown[0] != shown[1]:
            return shown
    return repr(first), repr(second)


def _title(text: str, count: int = 0) -> Text:
    return Text.assemble((text, "bold"), (f"  {count:,}" if count else "", "dim"))


def _grid(heads: Sequence[str], width: int | None = None) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim", pad_edge=False, show_header=any(heads))
    for head in heads:
        # fold: a long path or name wraps, but is never cut
        table.add_column(head, overflow="fold", max_width=width, no_wrap=head == "gradient")
    return table


def _settings(changed: Settings) -> Table:
    table = _grid(("", *NAMES))
    for key, values in changed.items():
        table.add_row(key, *(Text(units.MISSING, "dim") if value is None else _value(value) for value in values))
    return table


def _value(value: Any) -> str:
    # as in YAML and JSON: `true`, not `True`
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _outcome(runs: tuple[History, History], signs: Glyphs, width: int) -> Table:
    table = _grid(("", *NAMES), width=max(16, (width - 16) // 2))
    seen = [run_stats(run) for run in runs]
    rows: dict[str, Iterable[Text | str]] = {
        "run": [Text(run.info.name, "bold") for run in runs],
        "verdict": [_health(run, signs) for run in runs],
        "steps": [f"{run.steps:,}" for run in seen],
        "loss": [units.value(run.loss) if run.steps else units.MISSING for run in seen],
        "validation": [_validation(run) for run in seen],
        "time": [units.duration(run.seconds) for run in seen],
        "samples/s": [units.number(run.samples_per_s) for run in seen],
        "watching": [watching(run) for run in seen],
    }
    for name, cells in rows.items():
        table.add_row(Text(name, "dim"), *cells)
    return table


def _health(run: History, signs: Glyphs) -> Text:
    if run.step < 0:
        return Text(UNKNOWN, "dim")
    found = worst_severity(run)
    style = OK if found is None else SEVERITY[found]
    return Text.assemble(mark(found, signs), (f" {verdict(found, is_judged=is_judged(run))}", style))


def _validation(run: RunStats) -> str:
    # nan without a validation
    metrics = [units.number(run.val_loss)] if np.isfinite(run.val_loss) else []
    metrics += [units.percent(run.val_accuracy)] if np.isfinite(run.val_accuracy) else []
    return ", ".join(metrics) or units.MISSING


def _layers(found: Comparison, runs: tuple[History, History], signs: Glyphs, width: int) -> Group | None:
    """Return a table of the layers with different gradients: the factor, and the norm over both runs."""
    apart = [gap for gap in found.gaps if gap.spread >= MIN_DECADES]
    table = _grid(("", "gradient", *(f"{name} over the run" for name in NAMES)))
    room = 24 if width >= 100 else 12  # columns of each of the two trends
    for gap in apart[:MAX_LISTED]:
        trends = []
        for run in runs:
            values_T = run["grad.l2"][:, run.param.layers.index(gap.layer)]
            trends.append(sparkline(values_T, width=room, signs=signs, log=True))
        table.add_row(units.shorten(gap.layer, max(20, width - 2 * room - 30)), _times(gap), *trends)
    lines: list[Table | Text] = [table] if apart else []
    if len(apart) > MAX_LISTED:
        lines.append(Text(f"{len(apart) - MAX_LISTED:,} more", "dim"))
    for name, only in zip(NAMES, (found.only_first, found.only_second), strict=True):
        if only:
            more = f" and {len(only) - 3:,} more" if len(only) > 3 else ""
            lines.append(Text(f"only in {name}: {', '.join(only[:3])}{more}"))
    return Group(*lines) if lines else None


def _times(gap: GradientGap) -> str:
    if np.isinf(gap.decades):  # a ratio to zero
        return f"zero in {'A' if gap.decades > 0 else 'B'}"
    # neither run has larger gradients throughout: the difference changes sign over the steps
    if abs(gap.decades) < gap.spread / 2:
        return f"{units.times(10**gap.spread)} apart"
    return f"{units.times(10 ** abs(gap.decades))} larger in {'B' if gap.decades > 0 else 'A'}"


def _findings(runs: tuple[History, History], signs: Glyphs) -> Table | None:
    """Return a table of the findings in only one run, then in both, each group with the most severe first."""
    # one finding per kind and layer in a history, so the pair identifies it
    first, second = ({(f.kind, f.layer): f for f in run.findings} for run in runs)
    groups = {
        "only in A": [finding for key, finding in first.items() if key not in second],
        "only in B": [finding for key, finding in second.items() if key not in first],
        # one line for both runs: the more severe finding
        "in both": [max(first[key], second[key], key=lambda f: f.severity) for key in first if key in second],
    }
    table = _grid(("", ""))
    for title, findings in groups.items():
        for i, finding in enumerate(sorted(findings, key=lambda f: (-f.severity, f.step))[:MAX_LISTED]):
            table.add_row(Text(title if i == 0 else "", "dim"), _finding_text(finding, signs))
        if len(findings) > MAX_LISTED:
            table.add_row("", Text(f"{len(findings) - MAX_LISTED:,} more", "dim"))
    return table if table.row_count else None


def _finding_text(finding: Finding, signs: Glyphs) -> Text:
    text = Text.assemble(mark(finding.severity, signs), " ")
    text.append(f"{finding.code} {finding.kind}", SEVERITY[finding.severity])
    return text.append(f" in {finding.place}, {finding.when}")


def _plain(run: History) -> dict[str, Any]:
    return {
        "name": run.info.name,
        "verdict": word(worst_severity(run), steps=run.step + 1),
        "facts": asdict(run_stats(run)),
        "findings": [finding.to_json() for finding in run.findings],
    }
