"""Read and write findings.jsonl, one finding per line. A later, more severe finding replaces an earlier one."""

from __future__ import annotations

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


FINDINGS = JsonLines(name="findings.jsonl", noun="finding", encode=_encode, decode=_decode)
