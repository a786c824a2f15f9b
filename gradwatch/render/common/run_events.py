"""List the events of a run that people should see: rewinds, skipped batches, saved steps, withdrawn findings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import final

from gradwatch.diagnose.confirmation import rerun_code
from gradwatch.events import BATCH_LEFT_OUT, INCIDENT, LEFT_OUT, NOT_RECORDED, REWIND, UNREAD
from gradwatch.history.store import History
from gradwatch.paths import RUN_CONFIG
from gradwatch.records import Event, Severity

LABELS = {
    REWIND: "rewind",
    BATCH_LEFT_OUT: "skipped",
    NOT_RECORDED: "not saved",
    UNREAD: "not read",
    LEFT_OUT: "left out",
    INCIDENT: "incident",
}
"""Event kinds to show, in this order, and their labels."""
WITHDRAWN = "withdrawn"
"""Label of the withdrawn findings."""
MAX_PER_KIND = 5
"""Number of events of a kind that are shown one by one: the default number of incidents."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvent:
    """One event of a run, ready to print.

    Args:
        label: Label of the event kind.
        text: Description of the event.
        command: Command that shows more, or an empty string.
    """

    label: str
    text: str
    command: str = ""


def run_events(history: History, *, run: Path | None, most: int = MAX_PER_KIND) -> Iterator[RunEvent]:
    """Yield the events of a run, grouped by kind, then the withdrawn findings above info.

    Args:
        history: The run.
        run: Run directory, or None.
        most: Maximum number of events of a kind; a last one says how many more there are.
    """
    for kind, label in LABELS.items():
        mine = [event for event in history.events if event.kind == kind.name]
        for event in mine[:most]:
            yield _run_event(event, label, history, run)
        if len(mine) > most:
            yield RunEvent(label=label, text=f"and {len(mine) - most:,} more")
    over = [finding for finding in history.withdrawn if finding.severity > Severity.INFO]
    for finding in over[:most]:
        yield RunEvent(label=WITHDRAWN, text=finding.life)
    if len(over) > most:
        yield RunEvent(label=WITHDRAWN, text=f"and {len(over) - most:,} more")


def _run_event(event: Event, label: str, history: History, run: Path | None) -> RunEvent:
    command = replay(event, history, run=run)
    # the event's text names the saved files, which the command makes unnecessary
    text = f"Step {event.step:,} was saved. Replay it with:" if command else event.text
    return RunEvent(label=label, text=text, command=command)


def replay(event: Event, history: History, *, run: Path | None) -> str:
    """Return the command that replays the step of an incident, or an empty string."""
    if event.kind != INCIDENT.name or run is None:
        return ""
    # without a config, `gradwatch replay` cannot build the model: only `gradwatch train` saves one
    if not (run / RUN_CONFIG).is_file():
        return rerun_code(history, event.step) if history.directory else ""
    return f"gradwatch replay {run} --step {event.step}"


def early_ending(history: History) -> str:
    """Return how a run ended that did not reach its planned end; an empty string for other runs."""
    ending = history.ending
    return "" if ending is None or ending.kind in ("finished", "running") else ending.sentence(history.step + 1)
