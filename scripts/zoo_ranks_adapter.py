"""Serve the protocol of rank faults: watch a script on every rank, and read the verdict from its run directory.

ATTACH=zoo_ranks_adapter:attach VERDICT=zoo_ranks_adapter:verdict
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

import gradwatch
from gradwatch.records import Finding, Severity

RUN = "run"
INPUT = "input"
KINDS = {
    "rank-divergence": "divergence",
    "rank-data": "same_data",
    "unsynchronized-gradient": "no_sync",
    "rank-non-finite": "nan_data",
    "rank-setting": "setting",
}


def attach(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int = 0) -> gradwatch.Monitor:
    """Watch a model on one rank, with the run directory in the folder of the verdict."""
    return gradwatch.watch(model, optimizer, run=Path(os.environ["VERDICT_DIR"]) / RUN, on_finding=None)


def verdict(folder: str) -> dict[str, Any]:
    """Return the gravest finding between ranks, in the words of the protocol."""
    run = gradwatch.load_run(Path(folder) / RUN)
    found = [finding for finding in run.findings if finding.code.startswith("GW6")]
    graver = [finding for finding in run.findings if finding.severity > Severity.INFO]
    if not found:
        return {"fault": bool(graver), "kind": graver[0].kind if graver else None}
    finding = max(found, key=lambda f: (f.severity, -f.since))
    values = {quantity.key: quantity.value for quantity in finding.evidence}
    return {
        "fault": True,
        "kind": _kind(finding, values),
        "rank": int(values["rank"]) if "rank" in values else None,
        "layer": INPUT if values.get("rank.inputs_nonfinite") == 1 else finding.layer,
        "onset": finding.since,
    }


def _kind(finding: Finding, values: dict[str, float]) -> str:
    if finding.kind == "unsynchronized-gradient" and values.get("rank.clipped"):
        return "clip_before_reduce"
    return KINDS[finding.kind]
