"""Write the folder of an incident, atomically, as JSON and safetensors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gradwatch.history.disk.findings import FINDINGS
from gradwatch.records import Finding
from gradwatch.state import checkpoint_folder, codec

FOLDER, FACTS = "incidents", "incident.json"
FORMAT = 1
"""Grows with every change after which an older gradwatch could not read an incident."""
UNFINISHED = ".tmp"


def write(
    directory: Path, *, step: int, findings: Sequence[Finding], facts: Mapping[str, Any], state: Mapping[str, Any]
) -> Path:
    """Write an incident into `incidents/step-000247` of a run directory; one of that step is replaced.

    Args:
        directory: The run directory.
        step: The step that it is about.
        findings: What was found there.
        facts: Plain data for `incident.json`.
        state: A tree as `state.tree.encode` takes it.

    Returns:
        The incident's folder.

    Raises:
        OSError: It could not be written; nothing of it is left behind.
        CheckpointError: The state holds what a file cannot.
    """
    final_path = directory / FOLDER / f"step-{step:06d}"
    work = final_path.with_name(final_path.name + UNFINISHED)
    data, tensors = codec.encode(dict(state), name="incident")
    found = [FINDINGS.encode(finding) for finding in findings]
    named = {"format": FORMAT, "step": step, "findings": found} | dict(facts)
    lines = [f"{json.dumps(name)}: {json.dumps(value, allow_nan=False)}" for name, value in named.items()]
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    try:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        (work / FACTS).write_text(text)
        checkpoint_folder.write(work, data, tensors, step=step, best=False)
        shutil.rmtree(final_path, ignore_errors=True)
        work.rename(final_path)
        checkpoint_folder.sync(final_path.parent)
    except OSError:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return final_path
