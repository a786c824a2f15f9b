"""Write the health of a run as JSON: one document, or one line per event.

Format, version 1. Within a version, keys may be added, but no key is removed or changes its meaning. A number that is
NaN or infinite is null, so that every strict parser can read the document.

`gradwatch diagnose RUN --format json` writes one document:

    version     1
    run         RunInfo: name, created, layers, activations, precision, optimizer, device, total_steps, versions, ...
    step        newest recorded optimizer step, -1 before the first
    ending      {kind, reason, sentence}: how the run ended; kind is "finished", "early-stop", "non-finite", "critical",
                "interrupted", "failed", "running" or "killed"; null for a run in memory that has not ended
    verdict     "healthy" if no finding is more severe than info, else "warning" or "critical"; "unknown" without a step
    facts       steps, seconds, samples_per_s, watch_frac, watch_s, loss, val_loss, val_accuracy,
                wait_frac, peak_memory_bytes, planned_peak_bytes
    findings    list of {code, kind, layer, layers, onset, step, severity, message, withdrawn, ended, reason,
                evidence: [{key, name, value, unit}]}: the open findings; onset may be null
    withdrawn   list of the findings that later steps have shown to be over, each with `withdrawn`, `ended`, `reason`
    diagnoses   list of {cause, cause_id, certainty, severity, because, confirm, confirm_code, source, findings,
                remedies: [{text, patch, code, cures}]}
    events      list of {kind, step, layer, text, values}: rewinds, skipped batches, incidents, graph observations,
                checks and outputs that were left out because they raised (kind `left-out`)
    incidents   list of {step, replay}: the command, or Python code, that runs the step again

`diagnose --verify`, `--patch` and `--try` add these keys:

    proofs      list of {finding, control, comes_back, located, sorted,
                causes: [{cause, cause_id, status, checks}], further, seconds}
    cure        {patch, changes, others, steps, loss_before, loss_after, val_accuracy_after, findings_left}, or null
    attempt     {steps, same_loss, pairs: [{seed, old, new}], gone, came, better}, or null
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from gradwatch.events import INCIDENT
from gradwatch.history.ending import Ending
from gradwatch.history.store import History
from gradwatch.records import Diagnosis, Severity
from gradwatch.render.common.run_events import replay
from gradwatch.render.common.run_stats import run_stats, worst_severity

VERSION = 1
UNKNOWN = "unknown"


def dumps(
    history: History,
    diagnoses: Sequence[Diagnosis],
    proved: Mapping[str, Any] | None = None,
    *,
    run: Path | None = None,
) -> str:
    """Return the diagnosis of a run as one indented JSON document.

    Args:
        history: The run.
        diagnoses: Diagnoses of its findings.
        proved: Further keys of the document: `proofs`, `cure` and `attempt`.
        run: Run directory, or None.
    """
    # allow_nan=False: raise rather than write a `NaN` that strict parsers reject
    return json.dumps(strict(document(history, diagnoses, run=run) | dict(proved or {})), indent=2, allow_nan=False)


def document(history: History, diagnoses: Sequence[Diagnosis], *, run: Path | None = None) -> dict[str, Any]:
    """Return the diagnosis of a run as plain data, in the format that the module docstring describes."""
    return {
        "version": VERSION,
        "run": history.info.to_json(),
        "step": history.step,
        "ending": ended(history.ending, steps=history.step + 1),
        "verdict": word(worst_severity(history), steps=history.step + 1),
        "facts": asdict(run_stats(history)),
        "findings": [f.to_json() for f in history.findings],
        "withdrawn": [f.to_json() for f in history.withdrawn],
        "diagnoses": [d.to_json() for d in diagnoses],
        "events": [e.to_json() for e in history.events],
        "incidents": [
            {"step": e.step, "replay": replay(e, history, run=run)} for e in history.events if e.kind == INCIDENT.name
        ],
    }


def ended(ending: Ending | None, *, steps: int) -> dict[str, str] | None:
    """Return how a run ended as plain data with its sentence, or None.

    Args:
        ending: The ending, or None for an active run.
        steps: Number of recorded optimizer steps.
    """
    return ending.to_json() | {"sentence": ending.sentence(steps)} if ending else None


def word(found: Severity | None, *, steps: int) -> str:
    """Return the health of a run as a word, for all formats.

    Args:
        found: The highest severity above info, or None.
        steps: Number of recorded optimizer steps.
    """
    if found is not None:
        return str(found)
    # without a step, there is no data to call a run healthy
    return "healthy" if steps else UNKNOWN


def line(event: str, data: Mapping[str, Any]) -> str:
    """Return one event as a line of JSON: `{"event": ..., ...}`."""
    # no indent: one event per line, so that a program can read the stream as it grows
    return json.dumps(strict({"event": event, **data}), allow_nan=False)


def strict(value: Any) -> Any:
    """Return a value as strict JSON data: NaN and Inf become null, unknown types and keys become text."""
    # before float: np.float64 is a float too, but np.float32 and np.bool_ are not
    if isinstance(value, np.generic):
        return strict(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None  # JSON has no NaN or Inf
    if value is None or isinstance(value, str | int | bool):
        return value
    if isinstance(value, Mapping):
        return {str(k): strict(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [strict(v) for v in value]
    return str(value)
