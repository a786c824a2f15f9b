"""A run as a card in a notebook: HTML with the verdict, the findings, and the layers of most interest."""

# T = recorded steps, M = layers

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import escape

from gradwatch.history.store import History
from gradwatch.records import Diagnosis, Finding, Severity
from gradwatch.render.common import format as units
from gradwatch.render.common.config_patch import patch_yaml
from gradwatch.render.common.headline import headline
from gradwatch.render.common.layers import layers, norms_over_run, standouts, update_ratios, worst_finding, zero_fracs
from gradwatch.render.common.run_stats import worst_severity
from gradwatch.render.common.sparkline import UNICODE, sparkline
from gradwatch.render.common.style import OK, SEVERITY

MOST_FINDINGS, MOST_LAYERS = 8, 10
TREND = 16
CELL = "text-align:{};padding:2px 12px 2px 0;vertical-align:top"
FAINT = "opacity:.7"  # of the notebook's own ink, so that it is read on a light and on a dark page


def card(history: History, diagnoses: Sequence[Diagnosis]) -> str:
    """Return a run as HTML for a notebook; all text in it is escaped, and its ink is the page's.

    Args:
        history: The run.
        diagnoses: What explains its findings, the most telling first.
    """
    head, *rest = (re.sub("  +", " · ", line.plain.strip()) for line in headline(history, UNICODE))
    colour = OK if (found := worst_severity(history)) is None else SEVERITY[found].removeprefix("bold ")
    if history.step < 0:
        colour = "inherit"
    parts = [
        f'<div style="font-weight:bold;color:{colour}">{escape(head)}</div>',
        *(f'<div style="{FAINT}">{escape(line)}</div>' for line in rest),
        *(_causes(diagnoses)),
        _findings(history.findings),
        _layers(history) if history.step >= 0 else "",
    ]
    return f'<div style="font-size:13px;line-height:1.5">{"".join(parts)}</div>'


def _causes(diagnoses: Sequence[Diagnosis]) -> Iterator[str]:
    """Yield each cause with its certainty and the smallest change that mends it."""
    for diagnosis in sorted(diagnoses, key=lambda d: -d.severity):
        sure = f'<span style="{FAINT}">{escape(units.percent(diagnosis.certainty))} sure</span>'
        text = f"<b>{escape(diagnosis.cause)}</b> {sure}"
        for remedy in diagnosis.remedies[:1]:
            patch = (
                f"<pre style='margin:2px 0 2px 1.5em'>{escape(patch_yaml(remedy.patch))}</pre>" if remedy.patch else ""
            )
            text += f"<br>remedy: {escape(remedy.text)}{patch}"
        yield f'<div style="margin-top:6px">{text}</div>'


def _findings(findings: Sequence[Finding]) -> str:
    if not findings:
        return ""
    ordered = sorted(findings, key=lambda f: (-f.severity, f.step))
    rows = [
        (
            _severity(f.severity),
            f"{f.step:,}",
            _whole(f"{f.code} {f.kind}"),
            _whole(f.layer or "the whole run"),
            escape(f.message),
        )
        for f in ordered[:MOST_FINDINGS]
    ]
    more = len(ordered) - MOST_FINDINGS
    note = f'<div style="{FAINT}">{more:,} more</div>' if more > 0 else ""
    return _table(("finding", "step", "kind", "layer", ""), rows, right=(1,)) + note


def _whole(text: str) -> str:
    return f'<span style="white-space:nowrap">{escape(text)}</span>'


def _severity(severity: Severity) -> str:
    colour = SEVERITY[severity].removeprefix("bold ")
    return f'<span style="color:{colour};white-space:nowrap">{UNICODE.marks[severity]} {severity}</span>'


def _layers(history: History) -> str:
    """Return the layers of most interest, in the order of the model: those with findings, then the outliers."""
    known = layers(history.info.layers)
    if not known:
        return ""
    rank = {s.column: i for i, s in enumerate(standouts(history, known))}
    worst = [worst_finding(layer, history.findings) for layer in known]
    gravity = [-1 if finding is None else finding.severity for finding in worst]
    shown = sorted(sorted(range(len(known)), key=lambda m: (-gravity[m], rank[m]))[:MOST_LAYERS])
    norms_TM, ratios_M = norms_over_run(history, known)[1], update_ratios(history, known)
    zeros_M = zero_fracs(history.param.newest("grad.zero_frac")[None], known, history.info.layers)[0]
    rows = []
    for m in shown:
        norm = float(norms_TM[-1, m])
        gradient = "none" if norm != norm else "NaN or Inf" if norm == float("inf") else units.number(norm)
        bars = sparkline(norms_TM[:, m], width=TREND, signs=UNICODE, log=True)
        trend = f'<span style="font-family:monospace;white-space:pre">{escape(bars)}</span>'
        finding = worst[m]
        mark = _severity(finding.severity) if finding else ""
        ratio, zeros = units.number(float(ratios_M[m]), digits=2), units.percent(float(zeros_M[m]))
        rows.append((escape(known[m].name), gradient, trend, ratio, zeros, mark))
    more = len(known) - len(shown)
    note = f'<div style="{FAINT}">{more:,} more layers</div>' if more else ""
    return _table(("layer", "gradient", "over the run", "update/weight", "zeros", ""), rows, right=(1, 3, 4)) + note


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int]) -> str:
    """Return a table; its cells are HTML already."""
    side = [CELL.format("right" if i in right else "left") for i in range(len(heads))]
    head = "".join(
        f'<th scope="col" style="{s};font-weight:normal;{FAINT}">{h}</th>' for s, h in zip(side, heads, strict=True)
    )
    body = "".join(
        "<tr>" + "".join(f'<td style="{s}">{cell}</td>' for s, cell in zip(side, row, strict=True)) + "</tr>"
        for row in rows
    )
    style = "border-collapse:collapse;margin-top:8px"
    return f'<table style="{style}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
