"""Write findings and diagnoses as Markdown for TensorBoard's TEXT tab."""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import quote, urlencode

from gradwatch.history.store import History
from gradwatch.records import Diagnosis, Finding, Severity
from gradwatch.render.common import format as units
from gradwatch.render.common.config_patch import patch_yaml
from gradwatch.render.common.run_stats import health, too_short_for
from gradwatch.render.common.sparkline import UNICODE

MAX_FINDINGS = 100
"""Maximum number of findings in one text."""


def findings(found: Sequence[Finding], *, run: str, withdrawn: Sequence[Finding] = ()) -> str:
    """Return findings as a list: the open ones, most severe first, then the withdrawn ones.

    Args:
        found: Open findings to list.
        run: TensorBoard's name of the run, for the links to its charts.
        withdrawn: Withdrawn findings to list.
    """
    ended = _withdrawn(withdrawn)
    if not found:
        return "\n".join([f"**{UNICODE.ok} no problems found**", *([""] if ended else []), *ended])
    # a list, since the tab makes tables too narrow to read
    ordered = sorted(found, key=lambda f: (-f.severity, f.since))
    more = [f"\n{len(found) - MAX_FINDINGS:,} more are not shown."] if len(found) > MAX_FINDINGS else []
    return "\n".join([*(_item(f, run) for f in ordered[:MAX_FINDINGS]), *more, *ended])


def finding(found: Finding, *, run: str) -> str:
    """Return one finding, with a link to the charts of its layer."""
    return _item(found, run).removeprefix("* ")  # a single finding needs no bullet


def diagnosis(history: History, diagnoses: Sequence[Diagnosis], *, run: str) -> str:
    """Return the diagnosis of a run: each cause with its reason, its fix and a way to confirm it."""
    if not diagnoses and not history.findings:
        return _health(history)
    if not diagnoses:
        return findings(history.findings, run=run, withdrawn=history.withdrawn)
    return "\n\n".join(_diagnosis(d, run) for d in sorted(diagnoses, key=lambda d: -d.severity))


def code(text: str, language: str) -> str:
    """Return text as a fenced code block."""
    return f"```{language}\n{text.rstrip()}\n```"


def sign(severity: Severity) -> str:
    """Return the sign of a severity."""
    return UNICODE.marks[severity]


def _health(history: History) -> str:
    short = too_short_for(history)
    waits = [f"Too short for: {', '.join(short)}."] if short else []
    over = "\n".join(_withdrawn(history.withdrawn))
    return "\n\n".join([f"**{UNICODE.ok} {health(history)}**", *waits, *[over] * bool(over)])


def _withdrawn(findings: Sequence[Finding]) -> list[str]:
    return [f"* {UNICODE.ok} withdrawn: {f.life}" for f in findings[:MAX_FINDINGS]]


def _diagnosis(diagnosis: Diagnosis, run: str) -> str:
    parts = [
        f"## {sign(diagnosis.severity)} {diagnosis.cause}",
        f"*{diagnosis.severity}, {diagnosis.sureness}.* {diagnosis.because}",
    ]
    for remedy in diagnosis.remedies:
        parts.append(f"**Fix:** {remedy.text}")
        if remedy.patch:
            parts.append(code(patch_yaml(remedy.patch), "yaml"))
        elif remedy.code:
            parts.append(code(remedy.code, "python"))
    parts.append(f"**Confirm:** {diagnosis.confirm}")
    parts += [code(diagnosis.confirm_code, "")] if diagnosis.confirm_code else []
    parts += [findings(diagnosis.findings, run=run)]
    return "\n\n".join([*parts, f"*Source: {diagnosis.source}*"] if diagnosis.source else parts)


def _item(finding: Finding, run: str) -> str:
    where = f"`{finding.place}`" if finding.names else finding.place
    end = f" **Withdrawn at step {finding.withdrawn:,}: {finding.reason}.**" if finding.reason else ""
    quantities = ", ".join(f"{q.name} {units.quantity(q)}" for q in finding.evidence)
    step = f"[{finding.when}]({_link(finding, run)})"
    head = f"{sign(finding.severity)} **{finding.severity}, {step}, {finding.code} {finding.kind}**"
    return f"* {head} in {where}: {finding.message}" + (f" *({quantities})*" if quantities else "") + end


def _link(finding: Finding, run: str) -> str:
    """Return the URL of the charts of a finding, relative to the TensorBoard that shows the text."""
    # tagFilter and runFilter are regular expressions
    tags = f"^per_layer_.*/{re.escape(finding.layer)}" if finding.layer else "^(curves|gradients|updates|nonfinite)/"
    # TensorBoard names the run `.` if it was started on the run directory itself
    query = {"tagFilter": tags, "runFilter": f"{re.escape(run)}$|^\\.$", "smoothing": "0"}
    # quote: the default would write a space as `+`
    return f"?{urlencode(query, quote_via=quote)}#timeseries"
