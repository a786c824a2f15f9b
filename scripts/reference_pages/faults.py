"""Write a page for each kind of finding: its picture, its manual page, its thresholds and the causes behind it."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterator, Mapping

from gradwatch.config.names import registry
from gradwatch.detect import Detector, detector_classes
from gradwatch.diagnose.case import Case
from gradwatch.diagnose.causes import CAUSES, Cause
from gradwatch.diagnose.remedies import remedies
from gradwatch.diagnose.run_numbers import RunNumbers
from gradwatch.records import Finding, RunInfo, Severity
from scripts.reference_pages.markdown import cell, code, link_urls, table
from scripts.reference_pages.pictures import draw

SECTION = re.compile(r"([A-Z][\w' -]{2,40}):\s+")
"""How a paragraph of a manual page begins that has a heading."""


def fault_pages() -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each page. Names are codes, so that their order is that of the families."""
    for detector in detector_classes():
        yield detector.code, _page(detector)


def _page(detector: type[Detector]) -> str:
    entry = registry.DETECTORS.find(detector.kind)
    assert entry, "every detector is in the vocabulary"
    signature = entry.read()
    defaults = {p.name: (p.shown_default(), p.doc) for p in signature.parameters}
    title = f"{detector.code} {detector.kind}"
    lead, *rest = _paragraphs(signature.doc)
    sections = "\n\n".join(_section(paragraph) for paragraph in rest)
    return "\n\n".join(
        [
            f"# {title}",
            link_urls(lead),
            f'```{{raw}} html\n<div class="fault">\n{draw(detector)}\n</div>\n```',
            sections,
            _causes(detector),
            _thresholds(detector.kind, defaults),
        ]
    )


def _paragraphs(doc: str) -> list[str]:
    """Return the paragraphs of a manual page without its `Args`, each as one piece."""
    body = re.split(r"^\s*Args:\s*$", textwrap.dedent(doc), maxsplit=1, flags=re.M)[0]
    return [paragraph.strip("\n") for paragraph in re.split(r"\n\s*\n", body.strip())]


def _section(paragraph: str) -> str:
    """Return a paragraph, under a heading if it begins with one; indented lines are code."""
    if paragraph.startswith("    "):
        return code("python", textwrap.dedent(paragraph))
    found = SECTION.match(paragraph)
    if not found:
        return link_urls(paragraph)
    return f"## {found[1]}\n\n{link_urls(_capitalized(paragraph[found.end() :]))}"


def _thresholds(kind: str, defaults: Mapping[str, tuple[str, str]]) -> str:
    rows = [(f"`{name}`", f"`{default}`", cell(doc)) for name, (default, doc) in defaults.items()]
    settings = "\n".join(f"    {name}: {default}" for name, (default, _) in defaults.items())
    return (
        "## Thresholds\n\n"
        + table(("setting", "default", "meaning"), rows)
        + "\n\nIn a config:\n\n"
        + code("yaml", f"detect:\n  {kind}:\n    enabled: true\n{settings}")
        + f'\n\nIn Python: `gradwatch.watch(..., detect={{"{kind}": {{...}}}})`.'
    )


def _causes(detector: type[Detector]) -> str:
    """Return what can lie behind a finding, the likeliest first, with what to do about it."""
    led = sorted((cause for cause in CAUSES if detector.kind in cause.leads), key=lambda c: -c.leads[detector.kind])
    parts = [
        "## Likely causes",
        "`gradwatch diagnose` weighs these against what else the run shows.",
    ]
    for cause in led:
        lines = [
            f"### {_capitalized(cause.name)}",
            link_urls(cause.because),
            f"**To confirm:** {link_urls(cause.confirm)}",
        ]
        if fixes := _remedies(detector, cause):
            lines.append("**To fix:** " + "; ".join(fixes) + ".")
        parts += [*lines, f"Source: {link_urls(cause.source)}"]
    return "\n\n".join(parts) if led else ""


def _remedies(detector: type[Detector], cause: Cause) -> list[str]:
    """Return the remedies of a cause in words, without those whose text takes the numbers of a run."""
    nothing = RunNumbers(steady_rate=math.nan, jumped_at=None, usual_norm=math.nan, update_ratio=math.nan)
    finding = Finding(code=detector.code, kind=detector.kind, layer=None, step=0, severity=Severity.WARNING, message="")
    info = RunInfo(name="", created="", layers=(), optimizer="SGD")
    found = remedies(cause.remedies, Case(findings=[finding], numbers=nothing, info=info))
    return [remedy.text for remedy in found]


def _capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]
