"""Write diagnoses and findings as HTML: evidence, trend, cause, confirmation, remedies, manual page."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from html import escape

from gradwatch.detect import detectors
from gradwatch.history.store import History
from gradwatch.records import Diagnosis, Finding, Remedy, Severity
from gradwatch.render.common import format as units
from gradwatch.render.common.config_patch import TESTED, patch_yaml
from gradwatch.render.common.series import series_of
from gradwatch.render.common.sparkline import UNICODE

MAX_TRENDS = 40
"""Maximum number of kinds with a trend, since each trend reads the history once."""
TREND_WIDTH = 64
MAX_ROWS = 500
"""Maximum number of findings of a kind in a table."""


def diagnosis_cards(history: History, diagnoses: Sequence[Diagnosis]) -> str:
    """Return a card for each diagnosis, most severe first, then one for the unexplained findings."""
    # a detector's class docstring is its manual page
    pages = {d.code: inspect.getdoc(type(d)) or "" for d in detectors()}
    explained = {f for d in diagnoses for f in d.findings}
    cards = [
        _card(d.severity, d.cause, d.sureness, [*_cause(d), *_found(d.findings, history, pages)])
        for d in sorted(diagnoses, key=lambda d: -d.severity)
    ]
    if loose := sorted((f for f in history.findings if f not in explained), key=lambda f: -f.severity):
        cards.append(_card(loose[0].severity, "no known cause", "", [*_found(loose, history, pages)]))
    return "\n".join(cards)


def badge(severity: Severity | None, text: str) -> str:
    """Return a text with the sign and the color of a severity; None is healthy."""
    name = "healthy" if severity is None else str(severity)
    sign = UNICODE.ok if severity is None else UNICODE.marks[severity]
    # screen readers read the text, not the sign
    return f'<span class="badge {name}"><span aria-hidden="true">{sign}</span> {escape(text)}</span>'


def code(text: str) -> str:
    """Return text as a code block that scrolls horizontally."""
    # tabindex: a block that has the focus scrolls by keyboard
    return f'<pre tabindex="0"><code>{escape(text.rstrip())}</code></pre>'


def _card(severity: Severity, title: str, aside: str, parts: Sequence[str]) -> str:
    sure = f' <span class="sure">{escape(aside)}</span>' if aside else ""
    head = f"<header>{badge(severity, str(severity))}<h3>{escape(title)}</h3>{sure}</header>"
    return f'<article class="card {severity}">{head}{"".join(parts)}</article>'


def _cause(diagnosis: Diagnosis) -> Iterator[str]:
    yield f"<p>{escape(diagnosis.because)}</p>"
    if diagnosis.remedies:
        yield '<h4>How to fix it</h4><ol class="remedies">'
        yield from (_remedy(remedy) for remedy in diagnosis.remedies)
        yield "</ol>"
    yield f"<h4>How to confirm it</h4><p>{_linked(diagnosis.confirm)}</p>"
    if diagnosis.source:
        yield f'<p class="source">Source: {_linked(diagnosis.source)}</p>'


def _remedy(remedy: Remedy) -> str:
    change = patch_yaml(remedy.patch) if remedy.patch else remedy.code
    tested = "" if remedy.cures is None else f" <b>{TESTED[remedy.cures]}</b>"
    return f"<li><p>{escape(remedy.text)}{tested}</p>{code(change) if change else ''}</li>"


def _found(findings: Sequence[Finding], history: History, pages: dict[str, str]) -> Iterator[str]:
    """Yield, for each kind, its first finding with evidence and trend, the table of all, and the manual page."""
    by_kind: dict[str, list[Finding]] = {}
    for finding in findings:
        by_kind.setdefault(finding.kind, []).append(finding)
    yield "<h4>What was found</h4>"
    for i, mine in enumerate(by_kind.values()):
        first = mine[0]
        severity = badge(first.severity, str(first.severity))
        yield f'<section class="finding"><h5>{escape(first.code)} {escape(first.kind)} {severity}</h5>'
        yield f"<p>{_place(first)}: {escape(first.message)}</p>"
        yield _trend(first, history) if i < MAX_TRENDS else ""
        yield _evidence(first)
        yield _further(mine)
        if page := pages.get(first.code):
            manual = f'<pre class="manual" tabindex="0">{_linked(page)}</pre>'
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


def _trend(finding: Finding, history: History) -> str:
    """Return the series of a finding as a line of bars, with its onset marked."""
    series = series_of(finding, history)
    if series is None:
        return ""
    bars, onset = series.draw(finding.since, width=TREND_WIDTH, signs=UNICODE)
    about = escape(f"{series.caption}; {finding.when}")
    mark = f'{" " * onset}<span class="onset">{UNICODE.onset} step {finding.since:,}</span>'
    # role and label: a screen reader would spell out the bars
    picture = f'<pre class="bars" role="img" aria-label="{about}">{bars}\n{mark}</pre>'
    return f'<figure class="trend">{picture}<figcaption>{about}</figcaption></figure>'


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
        f'<th scope="col">{name}</th>' for name in ("layer", "since step", "found at step", "severity", "what")
    )
    return (
        f"<details><summary>All {len(findings):,} places</summary>"
        f'<div class="wide" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
        f"{more}</details>"
    )


def _linked(text: str) -> str:
    # escape first, so that only our own tags are HTML; punctuation at the end belongs to the sentence, not to the URL
    return re.sub(r"https?://[^\s<>&]*[^\s<>&.,;)]", r'<a href="\g<0>" rel="noreferrer">\g<0></a>', escape(text))
