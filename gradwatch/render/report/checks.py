"""Write the table of all detectors: what each found, or why it found nothing."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

import yaml

from gradwatch.attempts import DETECTOR
from gradwatch.detect import Detector, detector_classes
from gradwatch.events import LEFT_OUT
from gradwatch.history.store import History
from gradwatch.records import Finding, Severity
from gradwatch.render.common import format as units
from gradwatch.render.common.run_stats import too_short_for
from gradwatch.render.report.text import badge, prose

FOUND, NOTE, OVER, LEFT, OFF = "problem", "note", "is over", "left out", "switched off"
WAITING, PASSED = "not judged yet", "passed"
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where PyYAML comes with libyaml
ORDER = {
    FOUND: "found a problem",
    OVER: "found a problem that is over",
    NOTE: "gave a note",
    LEFT: "left out after errors",
    OFF: "switched off",
    WAITING: "could not judge yet",
    PASSED: "passed",
}
"""Each result with its words for a sentence, in the order of the table."""


class Check(NamedTuple):
    """One row of the table.

    Attributes:
        code: Code of the detector.
        kind: Kind of its findings.
        status: One of `ORDER`.
        times: Number of findings, including withdrawn ones.
        severity: Highest severity of the open findings, or None without one.
        note: The first finding, the reason why nothing could be found, or the symptom that the detector looks for.
    """

    code: str
    kind: str
    status: str
    times: int
    severity: Severity | None
    note: str


def checks(history: History, *, config_text: str = "") -> list[Check]:
    """Return a row for each detector, problems first.

    Args:
        history: The run.
        config_text: Text of its config, which may switch detectors off, or an empty string.
    """
    settings, order = _detect_settings(config_text), [*ORDER]
    waiting = too_short_for(history)
    rows = [_check(detector, history, settings, waiting) for detector in detector_classes()]
    return sorted(rows, key=lambda row: (order.index(row.status), -(row.severity or 0), row.code))


def check_table(history: History, *, config_text: str = "") -> str:
    """Return the table of all detectors as HTML, or an empty string for a run without a step."""
    if history.step < 0:
        return ""
    rows = checks(history, config_text=config_text)
    head = "".join(f'<th scope="col">{name}</th>' for name in ("check", "result", "times", "details"))
    body = "".join(_row(row) for row in rows)
    table = f'<table class="checks"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    return f'<p class="hint">{_summary(rows)}</p><div class="wide" tabindex="0">{table}</div>'


def _check(detector: type[Detector], history: History, settings: Mapping[str, Any], waiting: Sequence[str]) -> Check:
    kind = detector.kind
    mine = [f for f in history.findings if f.kind == kind]
    over = [f for f in history.withdrawn if f.kind == kind]
    severity = max((f.severity for f in mine), default=None)
    failures = [e.text for e in history.events if e.kind == LEFT_OUT.name and e.text.startswith(f"{DETECTOR}{kind} (")]
    if mine:
        status, note = (NOTE if severity is Severity.INFO else FOUND), _found(mine)
    elif over:
        status, note = OVER, over[0].life
    elif failures:
        status, note = LEFT, failures[0]
    elif settings.get(kind, {}).get("enabled") is False:
        status, note = OFF, f"`detect.{kind}.enabled` is `false`"
    elif kind in waiting:
        status, note = WAITING, "The run is too short."
    else:
        # the first line of a manual page says what the detector looks for
        status, note = PASSED, (inspect.getdoc(detector) or "").partition("\n")[0]
    return Check(detector.code, kind, status, len(mine) + len(over), severity, note)


def _found(findings: Sequence[Finding]) -> str:
    first = min(findings, key=lambda f: (-f.severity, f.since))
    return f"{first.when}, {first.place}: {first.message}"


def _detect_settings(config_text: str) -> dict[str, dict[str, Any]]:
    """Return the settings of detectors by kind, from the text of a config that may be damaged."""
    try:
        document = _Loader(config_text).get_single_data()
    except yaml.YAMLError:
        return {}
    section = document.get("detect") if isinstance(document, dict) else None
    return {kind: of for kind, of in section.items() if isinstance(of, dict)} if isinstance(section, dict) else {}


def _summary(rows: Sequence[Check]) -> str:
    counts = Counter(row.status for row in rows)
    named = ", ".join(f"{counts[status]} {words}" for status, words in ORDER.items() if counts[status])
    return f"{units.plural(len(rows), 'check')}: {named}."


def _row(row: Check) -> str:
    # no sign: only a detector that judged the run may say that all is well
    plain = f'<span class="badge">{row.status}</span>'
    result = plain if row.status in (OVER, LEFT, OFF, WAITING) else badge(row.severity, row.status)
    times = f"{row.times:,}" if row.times else ""
    return (
        f'<tr><th scope="row">{escape(row.code)} {escape(row.kind)}</th><td>{result}</td><td>{times}</td>'
        f"<td>{prose(row.note)}</td></tr>"
    )
