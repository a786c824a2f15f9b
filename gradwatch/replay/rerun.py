"""Rerun recorded steps, and report whether they are bit-identical, or which values differ and by how much."""

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
"""Maximum number of steps to run past the requested ones, to reach a recorded hash of the weights."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Hold the hashes of all bits of the weights before a step.

    Args:
        step: The step that follows.
        recorded: Hash of the weights of the run, from an incident or a checkpoint.
        again: Hash of the weights of the rerun.
    """

    step: int
    recorded: str
    again: str

    @property
    def is_same(self) -> bool:
        """Whether the weights are bit-identical."""
        return self.recorded == self.again


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RerunStep:
    """Hold the result of rerunning one requested step.

    Args:
        step: Optimizer step.
        loss: Loss of the rerun.
        norm: Norm of the gradient before clipping.
        is_skipped: Whether the update was skipped.
        compared: Number of recorded values that were compared; 0 if the rows of the step have been thinned out.
        is_same: Whether all compared values are bit-identical.
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
    """Hold the result of rerunning steps.

    Args:
        run: The run directory.
        step: First requested step.
        until: Last requested step.
        start_step: Step of the saved state, from which the steps were run again.
        source: Source of the state: `incident`, `checkpoint` or `start`.
        findings: Findings of the step if it has an incident.
        steps: Results of the requested steps.
        compared: Number of recorded values that were compared, over all steps of the rerun.
        differences: Values that differ, the earliest first.
        weights: Comparisons of the weights at all steps with a recorded hash, in the order of steps.
        machine: Changed properties of the machine: name to recorded and current value.
        is_data_changed: Whether a batch differs from the recorded one.
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
        """Whether all recorded values and weights are bit-identical."""
        return not self.differences and all(weights.is_same for weights in self.weights)

    def to_json(self) -> dict[str, Any]:
        """Return plain data; numbers that are not finite are text."""
        data = asdict(self) | {"run": str(self.run), "is_same": self.is_same}
        # findings have a JSON form of their own, which differs from `asdict`
        data["findings"] = [finding.to_json() for finding in self.findings]
        plain: dict[str, Any] = _plain(data)
        return plain


def rerun(run: Path, *, step: int | None = None, until: int | None = None) -> Rerun:
    """Rerun steps of a run, and compare them with the recorded ones.

    Args:
        run: The run directory.
        step: First step; None for the step of the first incident.
        until: Last step; None for the first step alone.

    Raises:
        RunError: The run has no such steps.
    """
    source = find_start_state(run, step)
    last = source.step if until is None else until
    if last < source.step:
        raise RunError(f"--until: got {last}, expected {source.step} or more, its first step")
    known = _known_weights(source, last)
    # up to `last + 1`, since hashes are of the weights before a step
    asked = [number for number in known if number <= last + 1]
    # otherwise one hash after the requested steps, which covers their updates too
    ends = [] if last + 1 in known else [number for number in known if number > last][:1]
    with restored_session(source, load_config(run / "config.yaml")) as session:
        weights = []
        for number in asked + ends:
            run_until(session, number)
            if session.progress.step == number:  # the training may end before
                weights.append(Weights(step=number, recorded=known[number], again=fingerprint(session.training)))
        run_until(session, last + 1)
        again = rows(session.pipeline.history, first=source.begins_at)
        differences, counts = compare_rows(recorded(source), again)
        now = machine(session.device)
    # only recorded names: nothing is known about the machine at the start of a run
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
    """Return hashes of the run's weights by the step that follows, up to `AHEAD` steps after the last step."""
    known = {}
    if source.kind == "incident" and source.incident is not None:
        weights = source.incident.facts["weights"]
        known[int(weights["step"])] = str(weights["hash"])
    else:
        root = source.run / "checkpoints"
        for number in checkpoint.steps(root):
            # later than the start: the weights at the start are the loaded ones, which proves nothing
            if source.begins_at < number <= last + AHEAD:
                known[number] = f"{hash_batch(checkpoint.load(root, step=number)[1]['model']):012x}"
    # limited again, for the hash of an incident
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
                is_skipped=bool(values["skipped"][t] == 1),  # nan, which is truthy, does not count
                compared=counts.get(step, 0),
                is_same=step not in bad,
            )


def _plain(value: Any) -> Any:
    """Return nested data with NaN and Inf as text, since JSON has no numbers for them."""
    if isinstance(value, float):
        return value if np.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
