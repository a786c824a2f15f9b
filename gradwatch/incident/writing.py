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
"""Format version, raised with every change that an older gradwatch could not read."""
UNFINISHED = ".tmp"


def write(
    directory: Path, *, step: int, findings: Sequence[Finding], facts: Mapping[str, Any], state: Mapping[str, Any]
) -> Path:
    """Write an incident into a folder such as `incidents/step-000247`, replacing an incident of the same step.

    Args:
        directory: The run directory.
        step: Optimizer step with the findings.
        findings: Findings of this step.
        facts: Plain data for `incident.json`.
        state: Nested state for `codec.encode`.

    Returns:
        The folder of the incident.

    Raises:
        OSError: The incident could not be written; no partial files remain.
        CheckpointError: The state contains a type that a file cannot hold.
    """
    final_path = directory / FOLDER / f"step-{step:06d}"
    work = final_path.with_name(final_path.name + UNFINISHED)
    # encoded before anything on disk changes, since this may raise
    data, tensors = codec.encode(dict(state), name="incident")
    found = [FINDINGS.encode(finding) for finding in findings]
    named = {"format": FORMAT, "step": step, "findings": found} | dict(facts)
    # one line per entry: readable, without a line for each sample index
    lines = [f"{json.dumps(name)}: {json.dumps(value, allow_nan=False)}" for name, value in named.items()]
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    try:
        # a killed process may have left a partial folder
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        (work / FACTS).write_text(text)
        checkpoint_folder.write(work, data, tensors, step=step, best=False)
        # renamed last, so that a folder without suffix is always complete
        shutil.rmtree(final_path, ignore_errors=True)
        work.rename(final_path)
        checkpoint_folder.sync(final_path.parent)
    except OSError:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return final_path
