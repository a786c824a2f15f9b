"""Run recorded steps again, and say whether they are the same to the last bit, or what differs and by how much."""

# T = recorded steps, L = layers (rows of a table), S = statistics

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import numpy as np

from gradwatch.config.load import load_config
from gradwatch.errors import RunError
from gradwatch.history.compare import ValueDifference, compare_rows
from gradwatch.probe.batches.batch_hash import hash_batch
from gradwatch.records import Finding
from gradwatch.replay.restore.restored_session import restored_session, run_until
from gradwatch.replay.restore.start_state import StartState, find_start_state, recorded
from gradwatch.train import checkpoint
from gradwatch.train.recovery.incidents import fingerprint, rows
from gradwatch.train.training_state import machine

NORM = "grad_norm.before_clip"
AHEAD = 100
"""Steps that are run beyond the asked for to get to where the weights are known."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The weights before a step, as hashes of all their bits.

    Args:
        step: The step that they were about to make.
        recorded: Hash of the run's, from an incident or a checkpoint.
        again: Hash of those that came out.
    """

    step: int
    recorded: str
    again: str

    @property
    def is_same(self) -> bool:
        """Whether they are equal to the last bit."""
        return self.recorded == self.again


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RerunStep:
    """One of the steps that were asked for, as it came out again.

    Args:
        step: Optimizer step.
        loss: Its loss.
        norm: Norm of its gradient before clipping.
        is_skipped: Whether its update was left out.
        compared: Recorded numbers of the step that it was compared with; 0 where they have been thinned away.
        is_same: Whether all of these came out again.
    """

    step: int
    loss: float
    norm: float
    is_skipped: bool
    compared: int
    is_same: bool


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Rerun:
    """What came of running steps again.

    Args:
        run: The run directory.
        step: The first step that was asked for.
        until: The last one.
        start_step: The step of the kept state; those from there on were run again.
        source: `incident`, `checkpoint` or `start`: where the state was from.
        findings: What was found at the step, where it is that of an incident.
        steps: The steps that were asked for.
        compared: How many recorded numbers were compared, over all steps that were run again.
        differences: What differs, the earliest first.
        weights: Where weights are known, whether they came out again, growing by step.
        machine: What is different about the machine: name to what it was and what it is.
        is_data_changed: Whether a batch is not what it was.
    """

    run: Path
    step: int
    until: int
    start_step: int
    source: str
    findings: tuple[Finding, ...]
    steps: tuple[RerunStep, ...]
    compared: int
    differences: tuple[ValueDifference, ...]
    weights: tuple[Weights, ...]
    machine: dict[str, tuple[Any, Any]]
    is_data_changed: bool

    @property
    def is_same(self) -> bool:
        """Whether everything that was recorded came out again to the last bit."""
        return not self.differences and all(weights.is_same for weights in self.weights)

    def to_json(self) -> dict[str, Any]:
        """Return plain data; numbers that are not finite are text."""
        data = asdict(self) | {"run": str(self.run), "is_same": self.is_same}
        data["findings"] = [finding.to_json() for finding in self.findings]
        plain: dict[str, Any] = _plain(data)
        return plain


def rerun(run: Path, *, step: int | None = None, until: int | None = None) -> Rerun:
    """Run steps of a run again.

    Args:
        run: The run directory.
        step: The first; None is that of the first incident.
        until: The last; None is the first alone.

    Raises:
        RunError: There are no such steps.
    """
    source = find_start_state(run, step)
    last = source.step if until is None else until
    if last < source.step:
        raise RunError(f"--until: got {last}, expected {source.step} or more, its first step")
    known = _known_weights(source, last)
    asked = [number for number in known if number <= last + 1]
    ends = [] if last + 1 in known else [number for number in known if number > last][:1]
    with restored_session(source, load_config(run / "config.yaml")) as session:
        weights = []
        for number in asked + ends:
            run_until(session, number)
            if session.progress.step == number:
                weights.append(Weights(step=number, recorded=known[number], again=fingerprint(session.training)))
        run_until(session, last + 1)
        again = rows(session.pipeline.history, first=source.begins_at)
        differences, counts = compare_rows(recorded(source), again)
        now = machine(session.device)
    changed = {name: (then, now.get(name)) for name, then in source.machine.items() if now.get(name) != then}
    return Rerun(
        run=run,
        step=source.step,
        until=last,
        start_step=source.begins_at,
        source=source.kind,
        findings=source.incident.findings if source.incident else (),
        steps=tuple(_shown(again, differences, counts, first=source.step, last=last)),
        compared=sum(counts.values()),
        differences=tuple(differences),
        weights=tuple(weights),
        machine=changed,
        is_data_changed=any(difference.statistic == "batch_hash" for difference in differences),
    )


def _known_weights(source: StartState, last: int) -> dict[int, str]:
    """Return hashes of the run's weights, by the step that they were about to make, as far as is worth running."""
    known = {}
    if source.kind == "incident" and source.incident is not None:
        weights = source.incident.facts["weights"]
        known[int(weights["step"])] = str(weights["hash"])
    else:
        root = source.run / "checkpoints"
        for number in checkpoint.steps(root):
            if source.begins_at < number <= last + AHEAD:
                known[number] = f"{hash_batch(checkpoint.load(root, step=number)[1]['model']):012x}"
    return {number: known[number] for number in sorted(known) if source.begins_at < number <= last + AHEAD}


def _shown(
    again: Mapping[str, Any], differences: list[ValueDifference], counts: Mapping[int, int], *, first: int, last: int
) -> Iterator[RerunStep]:
    run = again["run"]
    bad = {difference.step for difference in differences}
    values = {name: run["values"][:, run["statistics"].index(name), 0] for name in ("loss", NORM, "skipped")}
    for t, step in enumerate(run["steps"].tolist()):
        if first <= step <= last:
            yield RerunStep(
                step=step,
                loss=float(values["loss"][t]),
                norm=float(values[NORM][t]),
                is_skipped=bool(values["skipped"][t] == 1),
                compared=counts.get(step, 0),
                is_same=step not in bad,
            )


def _plain(value: Any) -> Any:
    """Return nested data with numbers that are not finite as text, which JSON has no other form for."""
    if isinstance(value, float):
        return value if np.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
