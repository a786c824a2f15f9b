"""What a training keeps of its recent past, and what it writes down when something critical is found."""

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
from gradwatch.train.data_position import Position, positions
from gradwatch.train.session import Session
from gradwatch.train.training_state import TrainingState, machine

MOST_BATCH_BYTES = 256 * MEGABYTE
"""A larger batch is not written: where it stands in the data is, and there it can be read again."""


def handle_step(session: Session, *, finite: bool) -> list[Finding]:
    """Write an incident where something critical is news, and keep a snapshot where one is due.

    Args:
        session: A training between two steps.
        finite: Whether loss and gradient of the last step were.

    Returns:
        What is critical and news.
    """
    recorder, step = session.recorder, session.progress.step
    if recorder is None:
        session.pipeline.finish()
        return take_critical_findings(session)
    is_due = step >= recorder.due and recorder.is_rested(step)
    if is_due or not finite or session.is_watchful:
        session.pipeline.finish()  # so that a snapshot is good, and what the last step led to is known
    critical = take_critical_findings(session)
    _record(session, recorder, critical)
    if is_due and not critical:
        keep(session)
    return critical


def handle_final_step(session: Session) -> None:
    """Write an incident of what is found when the last rows are looked at."""
    session.pipeline.finish()
    critical = take_critical_findings(session)
    if session.recorder:
        _record(session, session.recorder, critical)


def take_critical_findings(session: Session) -> list[Finding]:
    """Return what is critical and nobody has acted on yet."""
    news = session.pipeline.unhandled_findings
    return [finding for finding in iter(lambda: news.pop(0) if news else None, None) if warrants_incident(finding)]


def keep(session: Session) -> None:
    """Keep a copy of the state as it is, before the next step."""
    assert session.recorder, "called where there is one"
    began = time.perf_counter()
    try:
        if refused := session.recorder.keep(session.progress.step, session.state()):
            session.pipeline.add_event(NOT_RECORDED.emit(step=session.progress.step, reason=refused))
    except Exception as error:  # an optimizer of the user's own, too little memory: the training can do without
        session.recorder.give_up(error)
    if session.monitor:
        session.monitor.charge(time.perf_counter() - began)


def position_of(training: TrainingState, step: int, *, since: dict[str, Any] | None) -> Position:
    """Return where a step stands in the data.

    Args:
        live: The training.
        step: The step.
        since: Progress of an earlier state, or None for the start of the run.
    """
    since = since or {"step": 0, "epoch": 0, "batch": 0}
    accumulate, bad = training.config.train.accumulate, training.progress.bad
    steps = positions(training.batches, accumulate=accumulate, epoch=since["epoch"], batch=since["batch"], bad=bad)
    return next(itertools.islice(steps, step - since["step"], None))


def fingerprint(training: TrainingState) -> str:
    """Return a hash of the weights and buffers, which is equal where all of their bits are."""
    return f"{hash_batch(training.model.state_dict()):012x}"


def rows(history: History, *, first: int) -> dict[str, Any]:
    """Return the recorded rows from a step on, as plain data and arrays."""
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
    """Write an incident about findings, where there are any, and the config and the incidents before leave room."""
    if not findings or recorder.is_full or not session.config.watch.record.enabled:
        return
    try:
        _write(session, recorder, findings)
    except Exception as error:  # data that cannot be read a second time, for one: the training goes on
        recorder.give_up(error)


def _write(session: Session, recorder: Snapshotter, findings: Sequence[Finding]) -> None:
    """Write an incident about the first step at which one of the findings was made, and note where it is."""
    training, history = session.training, session.pipeline.history
    step = min(min(finding.step for finding in findings), training.progress.step - 1)
    snapshot = recorder.read() if recorder.step is not None and recorder.step <= step else None
    position = position_of(training, step, since=snapshot["progress"] if snapshot else None)
    window = position.read(training.batches)
    facts = {
        "snapshot": recorder.step if snapshot else None,
        "epoch": position.epoch,
        "batch": position.batch,
        "samples": [[int(i) for i in part] for part in position.indices(training.batches)],
        "weights": {"step": training.progress.step, "hash": fingerprint(training)},
        "machine": machine(training.device),
    }
    state = {
        "snapshot": snapshot,
        "window": window if num_bytes(window) <= MOST_BATCH_BYTES else None,
        "rows": rows(history, first=recorder.step if snapshot and recorder.step is not None else step),
    }
    written = recorder.write(step=step, findings=findings, facts=facts, state=state)
    if written:
        path, content = written.relative_to(session.directory), f"the state that reproduces step {step}"
        session.pipeline.add_event(INCIDENT.emit(step=step, path=path, content=content))
