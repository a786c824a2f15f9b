"""Find the recorded state of a run from which a step can be reached: an incident or a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

from gradwatch.diagnose.confirmation import rerun_code
from gradwatch.errors import RunError
from gradwatch.history.disk.header import NAME, Header
from gradwatch.history.disk.ranks import rank_parts
from gradwatch.history.disk.writer import read
from gradwatch.history.store import History
from gradwatch.incident import warrants_incident
from gradwatch.paths import RUN_CONFIG
from gradwatch.replay.incident import Incident, incidents
from gradwatch.train import checkpoint
from gradwatch.train.data_position import Identity
from gradwatch.train.recovery.incidents import rows


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StartState:
    """A recorded state of a run, from which a step is run again.

    Args:
        run: The run directory.
        step: The step to reach.
        incident: Incident of this step, or None.
        kind: Source of the state: `incident`, `checkpoint` or `start`.
        state: State for a `Session`; empty for the start of the run, which the seed reproduces.
        machine: Machine and settings that the bits depend on, from `training_state.machine`; empty if unknown.
        bad: Batches that the run skipped after a rewind. The remaining history has no step with these batches.
        world_size: Number of ranks that made the steps since the state.
        random: States of the random generators of the ranks, as many as the checkpoint has.
    """

    run: Path
    step: int
    incident: Incident | None
    kind: str
    state: dict[str, Any]
    machine: dict[str, Any]
    bad: list[Identity] = field(default_factory=list)
    world_size: int = 1
    random: tuple[Mapping[str, Any], ...] = ()

    @property
    def begins_at(self) -> int:
        """Step before which the state was copied."""
        return int(self.state["progress"]["step"]) if self.state else 0


def find_start_state(run: Path, step: int | None = None, *, of_ranks: bool = False) -> StartState:
    """Find the recorded state from which to rerun a step.

    Args:
        run: The run directory.
        step: The step, or None for the step of the first incident.
        of_ranks: Whether a step that several ranks have made is accepted.

    Raises:
        RunError: The run or the step does not exist, or no step is given and the run has no incident.
    """
    if not (run / RUN_CONFIG).is_file():
        raise RunError(
            f"{run}: not a run of `gradwatch train` (no config.yaml), and only such a run can be replayed "
            f"from its directory; {_own_way(run, step)}"
        )
    found = incidents(run)
    if step is None:
        if not found:
            raise RunError(f"{run}: {_without_incident(read(run))}")
        step = found[0].step
    incident = next((one for one in found if one.step == step), None)
    recorded = read(run).step
    # the step of an incident may be later: a rewind removes the steps that led to it from the history
    if incident is None and not 0 <= step <= recorded:
        raise RunError(f"{run}: got step {step}, expected 0 to {recorded}, the last recorded step")
    # the incident's own state first: it includes the rows recorded at that time, even if a rewind removed them
    if incident is not None and incident.snapshot_step is not None:
        return _of_incident(run, step, incident, incident)
    # the newest checkpoint first, for the fewest steps to rerun
    for number in sorted(checkpoint.steps(run / "checkpoints"), reverse=True):
        if number <= step:
            return _checked(_of_checkpoint(run, step, incident, number), of_ranks=of_ranks)
    for other in found:
        if other.snapshot_step is not None and other.snapshot_step <= step <= other.step:
            return _of_incident(run, step, incident, other)
    size = _world_size(run, after=0)
    start = StartState(run=run, step=step, incident=incident, kind="start", state={}, machine={}, world_size=size)
    return replace(_checked(start, of_ranks=of_ranks), bad=_left_out(run))


def recorded(source: StartState) -> dict[str, Any]:
    """Return the rows recorded since the state, by table: statistics, steps (T,) and values (T, S, L)."""
    if source.incident is not None and source.kind == "incident":
        # from the incident, since a rewind may have removed these rows from the history
        kept: dict[str, Any] = source.incident.state()["rows"]
        return kept
    return rows(read(source.run), first=source.begins_at)


def _own_way(run: Path, step: int | None) -> str:
    """Explain how to run a step of a user's own loop again."""
    saved = incidents(run) if (run / NAME).is_file() else ()
    steps = [one.step for one in saved if step in (None, one.step)]
    if not steps:
        only = f"; it saved the steps {', '.join(str(one.step) for one in saved)}" if saved else ""
        return f"read an incident of your own loop with gradwatch.incidents{only}"
    return f"step {steps[0]} of your own loop runs again with: {rerun_code(read(run), steps[0])}"


def _without_incident(history: History) -> str:
    """Return why a run has no incident, and which step to name instead."""
    critical = [finding.step for finding in history.findings if warrants_incident(finding)]
    if critical:  # incidents are disabled, or saving one failed with a warning
        return f"no incident of its critical problem was saved; name the step: --step {min(critical)}"
    step = min((finding.step for finding in history.findings), default=history.step)
    return f"no critical problem was found, so there is no incident to replay; name a step, such as --step {step}"


def _of_incident(run: Path, step: int, incident: Incident | None, holder: Incident) -> StartState:
    # without `bad`: the incident happened before the run skipped its batch
    state = holder.state()["snapshot"]
    machine = holder.facts.get("machine", {})
    return StartState(run=run, step=step, incident=incident, kind="incident", state=state, machine=machine)


def _of_checkpoint(run: Path, step: int, incident: Incident | None, number: int) -> StartState:
    state = checkpoint.load(run / "checkpoints", step=number)[1]
    machine, bad = state.get("machine", {}), _left_out(run)
    found = StartState(run=run, step=step, incident=incident, kind="checkpoint", state=state, machine=machine, bad=bad)
    if (size := _world_size(run, after=number)) == 1:
        return found
    random = tuple(part["random"] for part in checkpoint.parts(run / "checkpoints", number)[:size])
    return replace(found, world_size=size, random=random)


def _checked(source: StartState, *, of_ranks: bool) -> StartState:
    """Return a source, or raise a RunError if several ranks made its step and this is not accepted."""
    if source.world_size > 1 and not of_ranks:
        made = f"{source.run}: {source.world_size} ranks made step {source.step}"
        raise RunError(f"{made}, but this needs a step of one process; only `gradwatch replay` can repeat it")
    return source


def _world_size(run: Path, *, after: int) -> int:
    """Return the number of ranks that made the steps after a checkpoint: a resume may change it."""
    if not rank_parts(run):
        return 1
    root = run / "checkpoints"
    later = min((number for number in checkpoint.steps(root) if number > after), default=None)
    return Header.read(run).info.world_size if later is None else checkpoint.num_ranks(root, later)


def _left_out(run: Path) -> list[Identity]:
    """Return the batches that the run has skipped according to its newest checkpoint."""
    if not checkpoint.steps(run / "checkpoints"):
        return []
    bad: list[Identity] = checkpoint.load(run / "checkpoints")[1]["progress"].get("bad", [])
    return bad
