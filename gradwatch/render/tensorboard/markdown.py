"""Write findings and diagnoses as Markdown for TensorBoard's text tab."""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import quote, urlencode

from gradwatch.history.store import History
from gradwatch.records import Diagnosis, Finding, Severity
from gradwatch.render.common import format as units
from gradwatch.render.common.config_patch import patch_yaml
from gradwatch.render.common.sparkline import UNICODE

MOST = 100
"""Findings in one text: more would not be read."""


def findings(found: Sequence[Finding], *, run: str) -> str:
    """Return findings as a list, the gravest first: tables become too narrow to read in that tab.

    Args:
        found: What to tell.
        run: Name that TensorBoard gives the run, for the links to its charts.
    """
    if not found:
        return f"**{UNICODE.ok} healthy**: no problems found."
    ordered = sorted(found, key=lambda f: (-f.severity, f.step))
    more = [f"\n{len(found) - MOST:,} more are not shown."] if len(found) > MOST else []
    return "\n".join([*(_item(f, run) for f in ordered[:MOST]), *more])


def finding(found: Finding, *, run: str) -> str:
    """Return one finding, with a link to the charts of its layer."""
    return _item(found, run).removeprefix("* ")


def diagnosis(history: History, diagnoses: Sequence[Diagnosis], *, run: str) -> str:
    """Return the diagnosis of a run: for each cause why, how to confirm it, and the change that mends it."""
    if not diagnoses:
        return findings(history.findings, run=run)
    return "\n\n".join(_diagnosis(d, run) for d in sorted(diagnoses, key=lambda d: -d.severity))


def code(text: str, language: str) -> str:
    """Return text as a fenced block."""
    return f"```{language}\n{text.rstrip()}\n```"


def sign(severity: Severity) -> str:
    """Return the sign of a severity."""
    return UNICODE.marks[severity]


def _diagnosis(diagnosis: Diagnosis, run: str) -> str:
    parts = [
        f"## {sign(diagnosis.severity)} {diagnosis.cause}",
        f"*{diagnosis.severity}, {units.percent(diagnosis.certainty)} sure.* {diagnosis.because}",
    ]
    for remedy in diagnosis.remedies:
        parts.append(f"**Fix:** {remedy.text}")
        if remedy.patch:
            parts.append(code(patch_yaml(remedy.patch), "yaml"))
    parts += [f"**Confirm:** {diagnosis.confirm}", findings(diagnosis.findings, run=run)]
    return "\n\n".join([*parts, f"*Source: {diagnosis.source}*"] if diagnosis.source else parts)


def _item(finding: Finding, run: str) -> str:
    where = f"`{finding.layer}`" if finding.layer else "the whole run"
    told = ", ".join(f"{q.name} {units.quantity(q)}" for q in finding.evidence)
    step = f"[step {finding.step:,}]({_link(finding, run)})"
    head = f"{sign(finding.severity)} **{finding.severity}, {step}, {finding.code} {finding.kind}**"
    return f"* {head} in {where}: {finding.message}" + (f" *({told})*" if told else "")


def _link(finding: Finding, run: str) -> str:
    """Return the address of the charts that a finding is about, in the TensorBoard that shows the text.

    Its time series take filters of tags and runs as regular expressions. Where TensorBoard was started on the run
    directory itself, the run is called `.`.
    """
    tags = f"^per_layer_.*/{re.escape(finding.layer)}" if finding.layer else "^(loss|gradients|updates|nonfinite)/"
    query = {"tagFilter": tags, "runFilter": f"{re.escape(run)}$|^\\.$", "smoothing": "0"}
    return f"?{urlencode(query, quote_via=quote)}#timeseries"
