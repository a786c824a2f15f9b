"""Keep a recent snapshot of a training, and write an incident after a critical finding."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

from gradwatch.events import INCIDENT, NOT_RECORDED
from gradwatch.history.store import History
from gradwatch.incident import warrants_incident
from gradwatch.incident.recorder import MEGABYTE, Snapshotter
from gradwatch.probe.batches.batch_hash import hash_batch
from gradwatch.records import Finding
from gradwatch.state.snapshot import num_bytes
from gradwatch.train.data_position import Position, numbered, positions
from gradwatch.train.session import Session
from gradwatch.train.streams.batches import StreamBatches
from gradwatch.train.training_state import TrainingState, machine

MOST_BATCH_BYTES = 256 * MEGABYTE
"""Largest batch that an incident stores; of a larger batch, it stores only the data position, to read it again."""


def handle_step(session: Session, *, finite: bool) -> list[Finding]:
    """Write an incident if there are new critical findings, and keep a snapshot if one is due.

    Args:
        session: A training between two steps.
        finite: Whether loss and gradient of the last step were finite.

    Returns:
        The new critical findings.
    """
    recorder, step = session.recorder, session.progress.step
    if recorder is None:
        session.pipeline.finish()
        return take_critical_findings(session)
    is_due = step >= recorder.due and recorder.is_rested(step)
    if is_due or not finite or session.is_watchful:
        session.pipeline.finish()  # findings of the last step must be known before a snapshot counts as good
    critical = take_critical_findings(session)
    _record(session, recorder, critical)
    if is_due and not critical:  # a bad state would replace the last good one
        keep(session)
    return critical


def handle_final_step(session: Session) -> None:
    """Write an incident about the critical findings of the last rows, if there are any."""
    session.pipeline.finish()
    critical = take_critical_findings(session)
    if session.recorder:
        _record(session, session.recorder, critical)


def take_critical_findings(session: Session) -> list[Finding]:
    """Remove all unhandled findings from the pipeline, and return the critical ones."""
    news = session.pipeline.unhandled_findings
    # one pop(0) at a time: the worker thread appends concurrently, and clear() could drop a new finding
    return [finding for finding in iter(lambda: news.pop(0) if news else None, None) if warrants_incident(finding)]


def keep(session: Session) -> None:
    """Keep a copy of the state before the next step."""
    assert session.recorder, "called where there is one"
    began = time.perf_counter()
    try:
        if refused := session.recorder.keep(session.progress.step, session.state()):
            session.pipeline.add_event(NOT_RECORDED.emit(step=session.progress.step, reason=refused))
    except Exception as error:  # a user's own optimizer, too little memory: the training must continue without
        session.recorder.give_up(error)
    if session.monitor:  # the copy is overhead of watching, so it counts against the budget
        session.monitor.charge(time.perf_counter() - began)


def position_of(training: TrainingState, step: int, *, since: dict[str, Any] | None) -> Position:
    """Return the data position of a step.

    Args:
        training: The training.
        step: The step.
        since: Progress of an earlier state, or None for the start of the run.
    """
    since = since or {"step": 0, "epoch": 0, "batch": 0}
    accumulate, bad = training.config.train.accumulate, training.progress.bad
    # counted step by step, since bad steps in between take batches without counting as steps
    batches = numbered(training.batches)
    steps = positions(batches, accumulate=accumulate, epoch=since["epoch"], batch=since["batch"], bad=bad)
    return next(itertools.islice(steps, step - since["step"], None))


def fingerprint(training: TrainingState) -> str:
    """Return a hash of the weights and buffers: bit-identical states have equal hashes."""
    return f"{hash_batch(training.model.state_dict()):012x}"


def rows(history: History, *, first: int) -> dict[str, Any]:
    """Return the recorded rows from step `first`, as plain data and arrays."""
    kept = {}
    for name, table in (("param", history.param), ("act", history.act), ("run", history.run)):
        steps_T, values_TSL = table.rows()
        later_T = steps_T >= first
        kept[name] = {
            "statistics": list(table.statistics),
            "layers": list(table.layers),
            "steps": steps_T[later_T],
            "values": values_TSL[later_T],
        }
    return kept


def _record(session: Session, recorder: Snapshotter, findings: Sequence[Finding]) -> None:
    """Write an incident about findings, unless incidents are disabled or the limit of incidents is reached."""
    if not findings or recorder.is_full or not session.config.watch.record.enabled:
        return
    try:
        _write(session, recorder, findings)
    except Exception as error:  # such as data that cannot be read a second time: the training must continue
        recorder.give_up(error)


def _write(session: Session, recorder: Snapshotter, findings: Sequence[Finding]) -> None:
    """Write an incident about the first step among the findings, and add an event with its path."""
    training, history = session.training, session.pipeline.history
    step = min(min(finding.step for finding in findings), training.progress.step - 1)
    # a snapshot from after the step cannot reproduce it
    snapshot = recorder.read() if recorder.step is not None and recorder.step <= step else None
    window, place = _batches_of(training, step, since=snapshot["progress"] if snapshot else None)
    facts = {
        "snapshot": recorder.step if snapshot else None,
        **place,
        "weights": {"step": training.progress.step, "hash": fingerprint(training)},
        "machine": machine(training.device),
    }
    state = {
        "snapshot": snapshot,
        "window": window if window and num_bytes(window) <= MOST_BATCH_BYTES else None,
        "rows": rows(history, first=recorder.step if snapshot and recorder.step is not None else step),
    }
    written = recorder.write(step=step, findings=findings, facts=facts, state=state)
    if written:
        path, content = written.relative_to(session.directory), f"the state that reproduces step {step}"
        session.pipeline.add_event(INCIDENT.emit(step=step, path=path, content=content))


def _batches_of(
    training: TrainingState, step: int, *, since: dict[str, Any] | None
) -> tuple[list[Any] | None, dict[str, Any]]:
    """Return the batches of a step and their place in the data; of a stream, a replay reads them again."""
    if isinstance(training.batches, StreamBatches):
        return None, {}
    position = position_of(training, step, since=since)
    samples = [[int(i) for i in part] for part in position.indices(training.batches)]
    return position.read(training.batches), {"epoch": position.epoch, "batch": position.batch, "samples": samples}
