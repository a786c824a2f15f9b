"""Write diagnoses and findings as HTML: cause, remedies, evidence, picture, all places, manual page."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

import numpy as np

from gradwatch.detect import detectors
from gradwatch.history.store import History
from gradwatch.records import Diagnosis, Finding, Remedy, Severity
from gradwatch.render.common import format as units
from gradwatch.render.common.config_patch import TESTED, patch_command, patch_yaml
from gradwatch.render.common.problems import problems
from gradwatch.render.report.data import steps_without_gradient
from gradwatch.render.report.pictures import picture
from gradwatch.render.report.text import badge, code, prose

MAX_PICTURES = 40
"""Maximum number of kinds with a picture, since each picture reads the history once."""
MAX_ROWS = 500
"""Maximum number of findings of a kind in a table."""
MAX_STEPS = 10
"""Maximum number of steps that a sentence lists."""


def diagnosis_cards(history: History, diagnoses: Sequence[Diagnosis], *, run: Path | None = None) -> str:
    """Return a card for each diagnosis, most severe first, then one for the unexplained findings.

    Args:
        history: The run.
        diagnoses: Diagnoses of its findings.
        run: Run directory with a config.yaml, for commands that train it again, or None.
    """
    # a detector's class docstring is its manual page
    pages = {d.code: inspect.getdoc(type(d)) or "" for d in detectors()}
    cards = []
    for problem in problems(history, diagnoses):
        cause = [*_cause(problem.diagnosis, run)] if problem.diagnosis else []
        found = _found(problem.symptoms, problem.severity, history, pages)
        cards.append(_card(problem.severity, problem.cause, problem.sureness, [*cause, *found]))
    return "\n".join(cards)


def _card(severity: Severity, title: str, aside: str, parts: Sequence[str]) -> str:
    sure = f' <span class="sure">{escape(aside)}</span>' if aside else ""
    head = f"<header>{badge(severity, str(severity))}<h3>{escape(title)}</h3>{sure}</header>"
    return f'<article class="card {severity}">{head}{"".join(parts)}</article>'


def _cause(diagnosis: Diagnosis, run: Path | None) -> Iterator[str]:
    yield f"<p>{prose(diagnosis.because)}</p>"
    if diagnosis.remedies:
        yield '<h4>How to fix it</h4><ol class="remedies">'
        yield from (_remedy(remedy, run) for remedy in diagnosis.remedies)
        yield "</ol>"
    yield f"<h4>How to confirm it</h4><p>{prose(diagnosis.confirm)}</p>"
    if diagnosis.confirm_code:
        yield code(diagnosis.confirm_code, copy="the command")
    if diagnosis.source:
        yield f'<p class="source">Source: {prose(diagnosis.source)}</p>'


def _remedy(remedy: Remedy, run: Path | None) -> str:
    change = patch_yaml(remedy.patch) if remedy.patch else remedy.code
    tested = "" if remedy.cures is None else f" <b>{TESTED[remedy.cures]}</b>"
    block = code(change, copy="the change") if change else ""
    command = code(patch_command(run, remedy.patch), copy="the command") if run and remedy.patch else ""
    return f"<li><p>{prose(remedy.text)}{tested}</p>{block}{command}</li>"


def _found(
    symptoms: Sequence[Sequence[Finding]], worst: Severity, history: History, pages: dict[str, str]
) -> Iterator[str]:
    """Yield, for each kind, its first finding with evidence and picture, the table of all, and the manual page."""
    yield "<h4>What was found</h4>"
    for i, mine in enumerate(symptoms):
        first = mine[0]
        # the card has a badge for its highest severity
        severity = "" if first.severity is worst else f" {badge(first.severity, str(first.severity))}"
        yield f'<section class="finding" id="{escape(first.kind)}">'
        yield f"<h5>{escape(first.code)} {escape(first.kind)}{severity}</h5>"
        yield f"<p>{_place(first)}: {prose(first.message)}</p>{_broken_losses(first, history)}"
        yield picture(mine, history) if i < MAX_PICTURES else ""
        yield _evidence(first)
        yield _further(mine)
        if page := pages.get(first.code):
            manual = f'<pre class="manual" tabindex="0">{prose(page)}</pre>'
            yield f"<details><summary>Manual page of {escape(first.kind)}</summary>{manual}</details>"
        yield "</section>"


def _place(finding: Finding) -> str:
    """Return the layers and the onset of a finding, with a button that shows them on the heat map."""
    where = f"<code>{escape(finding.place)}</code>" if finding.names else finding.place
    show = "" if finding.layer is None else f' data-layer="{escape(finding.layer)}"'
    at = f' data-step="{finding.since}" data-kind="{escape(finding.kind)}"'
    # hidden: the script shows the buttons that lead somewhere, so there are none without a script
    button = f'<button type="button" class="show" hidden{show}{at}>Show on the map</button>'
    return f"{button}<b>{where}</b>, {finding.when}"


def _broken_losses(finding: Finding, history: History) -> str:
    """Return a sentence about the steps with a non-finite loss, or an empty string for a finding about gradients."""
    if finding.kind != "non-finite" or finding.layer is not None:
        return ""
    steps_T = history.steps("loss")[~np.isfinite(history["loss"])]
    if not steps_T.size:  # the gradient is broken, not the loss
        return ""
    listed = ", ".join(f"{step:,}" for step in steps_T[:MAX_STEPS].tolist())
    more = f" and {steps_T.size - MAX_STEPS:,} more" if steps_T.size > MAX_STEPS else ""
    at = f"The loss was NaN or Inf at {units.plural(int(steps_T.size), 'step')}: {listed}{more}."
    skipped = np.isin(steps_T, steps_without_gradient(history)).all()
    return f"<p>{at}{' The backward pass was skipped there, so no gradient was computed.' if skipped else ''}</p>"


def _evidence(finding: Finding) -> str:
    if not finding.evidence:
        return ""
    shown = [(escape(q.name), escape(units.quantity(q))) for q in finding.evidence]
    items = "".join(f"<div><dt>{name}</dt><dd>{measured}</dd></div>" for name, measured in shown)
    return f'<dl class="evidence" aria-label="Evidence">{items}</dl>'


def _further(findings: Sequence[Finding]) -> str:
    """Return the findings of a kind as a foldable table, if there are several."""
    if len(findings) == 1:  # the section shows the first finding in full
        return ""
    rows = "".join(
        f"<tr><td><code>{escape(f.place)}</code></td><td>{f.since:,}</td><td>{f.step:,}</td><td>{f.severity}</td>"
        f"<td>{escape(f.message)}</td></tr>"
        for f in findings[:MAX_ROWS]
    )
    more = f"<p>{len(findings) - MAX_ROWS:,} more are not listed.</p>" if len(findings) > MAX_ROWS else ""
    head = "".join(
        f'<th scope="col">{name}</th>' for name in ("layer", "since step", "found at step", "severity", "message")
    )
    return (
        f"<details><summary>All {len(findings):,} findings</summary>"
        f'<div class="wide" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
        f"{more}</details>"
    )
