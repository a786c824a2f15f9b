"""Rerun recorded steps, and report whether they are the same, or which values differ and by how much."""

# T = recorded steps, L = layers (rows of a table), S = statistics

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from gradwatch.config.load import load_config
from gradwatch.errors import RunError
from gradwatch.history.compare import ValueDifference, compare_rows, rounding_tolerance
from gradwatch.history.disk.ranks import part_of
from gradwatch.history.disk.writer import read
from gradwatch.paths import RUN_CONFIG
from gradwatch.probe.batches.batch_hash import hash_batch
from gradwatch.probe.device.sync import to_float
from gradwatch.records import Finding
from gradwatch.replay.restore.ranks_in_turn import RanksInTurn
from gradwatch.replay.restore.restored_session import ranks_in_turn, restored_session, run_until
from gradwatch.replay.restore.start_state import StartState, find_start_state, recorded
from gradwatch.train import checkpoint
from gradwatch.train.recovery.incidents import fingerprint, rows
from gradwatch.train.session import Session
from gradwatch.train.training_state import machine

NORM, HASH = "grad_norm.before_clip", "batch_hash"
MAX_STEPS_PAST = 100
"""Maximum number of steps to run past the requested ones, to reach a recorded hash of the weights."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The hashes of all bits of the weights before a step, as recorded and of the rerun.

    Args:
        step: The step that follows.
        recorded: Hash of the weights of the run, from an incident or a checkpoint.
        again: Hash of the weights of the rerun.
        distance: Norm of the difference of the weights, relative to their norm; None if only the hash is known.
        tolerance: Largest distance that counts as equal.
    """

    step: int
    recorded: str
    again: str
    distance: float | None = None
    tolerance: float = 0.0

    @property
    def is_same(self) -> bool:
        """Whether the weights are bit-identical, or as close as the tolerance allows."""
        return self.recorded == self.again or (self.distance is not None and self.distance <= self.tolerance)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RerunStep:
    """The result of rerunning one requested step.

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
    """The result of rerunning steps.

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
        world_size: Number of ranks that made the steps. The rerun of several ranks may be rounded differently.
        tolerance: Largest relative difference that counts as equal: 0 with one process.
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
    world_size: int = 1
    tolerance: float = 0.0

    @property
    def is_same(self) -> bool:
        """Whether all recorded values and weights are bit-identical, or with several ranks equal up to rounding."""
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
    source = find_start_state(run, step, of_ranks=True)
    last = source.step if until is None else until
    if last < source.step:
        raise RunError(f"--until: got {last}, expected {source.step} or more, its first step")
    known = _known_weights(source, last)
    # up to `last + 1`, since hashes are of the weights before a step
    asked = [number for number in known if number <= last + 1]
    # otherwise one hash after the requested steps, which covers their updates too
    ends = [] if last + 1 in known else [number for number in known if number > last][:1]
    config = load_config(run / RUN_CONFIG)
    tolerance = rounding_tolerance(config.train.precision) if source.world_size > 1 else 0.0
    with restored_session(source, config) as session:
        ranks = ranks_in_turn(session, source)
        weights = []
        for number in asked + ends:
            run_until(session, number)
            if session.progress.step == number:  # the training may end before
                weights.append(_weights(session, number, known[number], tolerance=tolerance))
        run_until(session, last + 1)
        again = rows(session.pipeline.history, first=source.begins_at)
        before = recorded(source)
        # with several ranks, the row of a step has the hash of a part of its batch
        differences, counts = compare_rows(before, again, tolerance=tolerance, without=(HASH,) if ranks else ())
        differences += _different_batches(run, ranks) if ranks else ()
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
        is_data_changed=any(difference.statistic == HASH for difference in differences),
        world_size=source.world_size,
        tolerance=tolerance,
    )


def _weights(session: Session, step: int, recorded: str, *, tolerance: float) -> Weights:
    """Compare the weights of a session with a recorded hash, and with a tolerance also with the checkpoint."""
    again, distance = fingerprint(session.training), None
    if tolerance and recorded != again:
        saved = checkpoint.load(session.directory / "checkpoints", step=step)[1]["model"]
        distance = _distance(saved, session.model.state_dict())
    return Weights(step=step, recorded=recorded, again=again, distance=distance, tolerance=tolerance)


def _distance(recorded: Mapping[str, Tensor], again: Mapping[str, Tensor]) -> float:
    """Return the norm of the difference of all floating-point tensors, relative to their norm."""
    names = [name for name, tensor in recorded.items() if tensor.is_floating_point()]
    gaps = [again[name].detach().to("cpu", torch.float64) - recorded[name].to(torch.float64) for name in names]
    gap, whole = (
        math.hypot(*(to_float(t.norm()) for t in tensors)) for tensors in (gaps, [recorded[n] for n in names])
    )
    return gap / whole if whole else gap


def _different_batches(run: Path, ranks: RanksInTurn) -> Iterator[ValueDifference]:
    """Yield the parts of batches whose hashes differ from the recorded ones, by rank."""
    for rank in range(ranks.world_size):
        history = read(part_of(run, rank))
        recorded = dict(zip(history.steps(HASH).tolist(), history[HASH].tolist(), strict=True))
        for step, hashes in ranks.hashes.items():
            then, now = recorded.get(step, math.nan), hashes[rank]
            if now is not None and not math.isnan(then) and then != now:
                yield ValueDifference(step=step, statistic=HASH, layer=f"rank {rank}", recorded=then, again=float(now))


def _known_weights(source: StartState, last: int) -> dict[int, str]:
    """Return hashes of the run's weights by the step that follows, up to `MAX_STEPS_PAST` steps after the last step."""
    known = {}
    if source.kind == "incident" and source.incident is not None:
        weights = source.incident.facts["weights"]
        known[int(weights["step"])] = str(weights["hash"])
    else:
        root = source.run / "checkpoints"
        for number in checkpoint.steps(root):
            # later than the start: the weights at the start are the loaded ones, which proves nothing
            if source.begins_at < number <= last + MAX_STEPS_PAST:
                known[number] = f"{hash_batch(checkpoint.load(root, step=number)[1]['model']):012x}"
    # limited again, for the hash of an incident
    return {number: known[number] for number in sorted(known) if source.begins_at < number <= last + MAX_STEPS_PAST}


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
