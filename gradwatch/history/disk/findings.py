"""Read and write findings.jsonl, one finding per line.

A later line of the same kind and layer replaces an open finding: it is more severe, or it withdraws the finding.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gradwatch.history.disk.aliases import key_of
from gradwatch.history.disk.jsonl import JsonLines, encode_number
from gradwatch.records import Finding


def _encode(finding: Finding) -> dict[str, Any]:
    data = finding.to_json()
    data["evidence"] = [quantity | {"value": encode_number(quantity["value"])} for quantity in data["evidence"]]
    return data


def _decode(data: dict[str, Any]) -> Finding:
    evidence = [_upgraded(quantity) | {"value": float(quantity["value"])} for quantity in data["evidence"]]
    return Finding.from_json(data | {"evidence": evidence})


def _upgraded(quantity: dict[str, Any]) -> dict[str, Any]:
    # gradwatch 0.1 wrote no keys
    return quantity if "key" in quantity else quantity | {"key": key_of(quantity["name"])}


def open_findings(lines: Iterable[Finding]) -> list[Finding]:
    """Return the findings that are still open after all lines of findings.jsonl."""
    newest = {(finding.kind, finding.layer): finding for finding in lines}
    return [finding for finding in newest.values() if finding.withdrawn is None]


FINDINGS = JsonLines(name="findings.jsonl", noun="finding", encode=_encode, decode=_decode)
