"""findings.jsonl: a finding per line, with the step at which it was written; a later, graver one supersedes."""

from __future__ import annotations

import json
import math
from pathlib import Path

from gradwatch.history import files
from gradwatch.records import Finding

NAME = "findings.jsonl"


def line(finding: Finding, *, at: int) -> bytes:
    """Return a finding as a line of JSON.

    Args:
        finding: What was found.
        at: Newest step of the history when it was made; with a graver one that is not the step it carries.
    """
    data = finding.to_json()
    data["step"] = int(data["step"])
    for quantity in data["evidence"]:
        value = float(quantity["value"])
        quantity["value"] = value if math.isfinite(value) else str(value)  # JSON has no nan and no infinity
    return json.dumps({"at": at} | data, allow_nan=False).encode() + b"\n"


def read(directory: Path, *, until: int | None = None) -> tuple[list[Finding], list[str]]:
    """Read the findings in the order of their making. One that a kill has cut off is left out, without a word.

    Args:
        directory: A run directory.
        until: Leave out those written after this step.

    Returns:
        The findings, and what is damaged, a sentence each.
    """
    kept, problems = _parse(directory / NAME, until)
    return [finding for _, finding in kept], problems


def truncate(directory: Path, *, until: int) -> None:
    """Delete the findings that were written after a step, and lines that are none."""
    kept, _ = _parse(directory / NAME, until)
    if (directory / NAME).exists():
        files.replace(directory / NAME, b"".join(line(finding, at=at) for at, finding in kept))


def _parse(path: Path, until: int | None) -> tuple[list[tuple[int, Finding]], list[str]]:
    if not path.exists():
        return [], []
    *texts, _unfinished = path.read_bytes().split(b"\n")
    kept, problems = [], []
    for number, text in enumerate(texts, start=1):
        try:
            data = json.loads(text)
            at = int(data.pop("at"))
            for quantity in data["evidence"]:
                quantity["value"] = float(quantity["value"])
            finding = Finding.from_json(data)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            problems.append(f"{path}, line {number} is no finding: {type(error).__name__}: {error}")
            continue
        if until is None or at <= until:
            kept.append((at, finding))
    return kept, problems
