"""Find the newest state of a run from which a step can be reached: an incident's, or a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from gradwatch.errors import RunError
from gradwatch.history.disk.writer import read
from gradwatch.incident import Incident, incidents
from gradwatch.train import checkpoint
from gradwatch.train.data_position import Identity
from gradwatch.train.recovery.incidents import rows


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StartState:
    """A state of a run, and what was recorded after it.

    Args:
        run: The run directory.
        step: The step to be reached.
        incident: The incident that the step is the subject of, or None.
        kind: `incident`, `checkpoint` or `start`: where the state is from.
        state: The state, as a `Session` runs on from it; empty for the start of the run, which its seed brings back.
        machine: Machine and settings that the bits depend on, from `training_state.machine`; empty if unknown.
        bad: Where a run that went back has left out batches since: in what is left of it, it never had them.
    """

    run: Path
    step: int
    incident: Incident | None
    kind: str
    state: dict[str, Any]
    machine: dict[str, Any]
    bad: list[Identity] = field(default_factory=list)

    @property
    def begins_at(self) -> int:
        """The step before which the state was taken."""
        return int(self.state["progress"]["step"]) if self.state else 0


def find_start_state(run: Path, step: int | None = None) -> StartState:
    """Return the state from which a step is run again.

    Args:
        run: The run directory.
        step: The step, or None for that of the first incident.

    Raises:
        RunError: There is no such run or step, or no incident where no step is named.
    """
    if not (run / "config.yaml").is_file():
        raise RunError(
            f"{run}: not a run of `gradwatch train` (no config.yaml), and only such a run can be replayed "
            "from its directory; read an incident of your own loop with gradwatch.incidents"
        )
    found = incidents(run)
    if step is None:
        if not found:
            history = read(run)
            named = min((f.step for f in history.findings), default=history.step)
            raise RunError(
                f"{run}: no critical problem was found, so there is no incident to replay; "
                f"name a step, such as --step {named}"
            )
        step = found[0].step
    incident = next((one for one in found if one.step == step), None)
    recorded = read(run).step
    if incident is None and not 0 <= step <= recorded:
        raise RunError(f"{run}: got step {step}, expected 0 to {recorded}, the last recorded step")
    if incident is not None and incident.snapshot_step is not None:
        return _of_incident(run, step, incident, incident)
    for number in sorted(checkpoint.steps(run / "checkpoints"), reverse=True):
        if number <= step:
            return _of_checkpoint(run, step, incident, number)
    for other in found:
        if other.snapshot_step is not None and other.snapshot_step <= step <= other.step:
            return _of_incident(run, step, incident, other)
    return StartState(run=run, step=step, incident=incident, kind="start", state={}, machine={}, bad=_left_out(run))


def recorded(source: StartState) -> dict[str, Any]:
    """Return the rows recorded from the state on, by table: its statistics, steps (T,) and values (T, S, L)."""
    if source.incident is not None and source.kind == "incident":
        kept: dict[str, Any] = source.incident.state()["rows"]
        return kept
    return rows(read(source.run), first=source.begins_at)


def _of_incident(run: Path, step: int, incident: Incident | None, holder: Incident) -> StartState:
    state = holder.state()["snapshot"]
    machine = holder.facts.get("machine", {})
    return StartState(run=run, step=step, incident=incident, kind="incident", state=state, machine=machine)


def _of_checkpoint(run: Path, step: int, incident: Incident | None, number: int) -> StartState:
    state = checkpoint.load(run / "checkpoints", step=number)[1]
    machine, bad = state.get("machine", {}), _left_out(run)
    return StartState(run=run, step=step, incident=incident, kind="checkpoint", state=state, machine=machine, bad=bad)


def _left_out(run: Path) -> list[Identity]:
    """Return what a run has left out in the end, and from where on."""
    if not checkpoint.steps(run / "checkpoints"):
        return []
    bad: list[Identity] = checkpoint.load(run / "checkpoints")[1]["progress"].get("bad", [])
    return bad
