"""Read the incidents of a run, and locate the first bad operation of a step that a user's own loop saved."""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, final

import torch
from torch import nn

from gradwatch.errors import CheckpointError, GradwatchError, RunError
from gradwatch.history.disk.findings import FINDINGS
from gradwatch.history.disk.header import Header
from gradwatch.history.disk.ranks import rank_parts
from gradwatch.incident.writing import FACTS, FOLDER, FORMAT
from gradwatch.paths import RUN_CONFIG, user_path
from gradwatch.records import Finding, Lines
from gradwatch.render.common.format import plural
from gradwatch.replay.locate.bad_operation import Located
from gradwatch.replay.locate.locate import JUMP, locate
from gradwatch.replay.locate.step_tracer import Step
from gradwatch.state import checkpoint_folder
from gradwatch.state.checkpoint_folder import DamagedError
from gradwatch.state.rng import preserved_random_state, set_random_state
from gradwatch.train.step import to_device

WRAPPERS = ("module.", "_orig_mod.")
"""Prefixes that DistributedDataParallel and torch.compile add to the names of the model that they wrap."""
TO_COPY = "allow more memory with record=gradwatch.incident.StepRecord(memory_mb=...), and run the loop again"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """A step that was saved after a critical finding.

    Args:
        path: Folder of the incident.
        step: Optimizer step with the finding.
        findings: Findings of this step that were known at the time of writing.
        facts: Further entries of `incident.json`: `snapshot` (the step before which the saved state was copied, or
            None). For a training from a config: `epoch` and `batch` (position of the step's first batch in the data)
            and `samples` (indices of its samples, a list for each micro-batch), which a stream does not have; `weights`
            (the step before which the weights were hashed, and the hash), and `machine` (settings other than the config
            that the numbers depend on). For your own loop: `micro_batches` (calls of `Monitor.step` in the step).
    """

    path: Path
    step: int
    findings: tuple[Finding, ...]
    facts: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the facts of an incident.

        Raises:
            RunError: The folder holds no incident, or a newer gradwatch wrote it.
        """
        try:
            data = json.loads((path / FACTS).read_bytes())
            if data.pop("format") > FORMAT:
                raise RunError(f"{path}: this incident was written by a newer gradwatch: update gradwatch")
            found = tuple(FINDINGS.decode(finding) for finding in data.pop("findings"))
            # `data` now holds only the entries without a field
            return cls(path=path, step=int(data.pop("step")), findings=found, facts=data)
        except RunError:  # a ValueError too: its text is already complete
            raise
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise RunError(f"{path}: cannot read an incident here ({type(error).__name__}: {error})") from error

    @property
    def snapshot_step(self) -> int | None:
        """Step before which the saved state was copied, or None if no state was saved."""
        found = self.facts.get("snapshot")
        return None if found is None else int(found)

    def state(self) -> dict[str, Any]:
        """Read the saved state.

        A training from a config has `snapshot` (state of the training, or None), `window` (the batches) and `rows`. A
        user's own loop has `snapshot`, `random` (states of the generators), `window` (inputs of the first
        forward pass) and, if the loop passes it to `Monitor.step`, `batch`.

        Raises:
            CheckpointError: The incident is damaged.
        """
        try:
            return checkpoint_folder.read(self.path)
        except DamagedError as error:
            raise CheckpointError(f"{self.path} is damaged: {error}") from error

    def locate(self, step: Step, *, model: nn.Module | Mapping[str, nn.Module], jump: float = JUMP) -> Located | None:
        """Run the saved step of your own loop again, and return its first bad operation.

        The model gets the weights and buffers from before the step, the random generators get their states from the
        beginning of its first forward pass, and `gradwatch.locate` runs the step on the saved batch. Model and
        generators are put back afterwards.

        The batch is what the loop passed to `Monitor.step(loss, batch=...)`; a tuple or list becomes the arguments of
        the step. Without it, the step gets the inputs of the first forward pass.

        Args:
            step: Function of the batch that returns the loss, as for `gradwatch.locate`.
            model: The model or models, as they were passed to `watch`, or without the wrapper of
                DistributedDataParallel or torch.compile. One process is enough.
            jump: As in `gradwatch.locate`.

        Returns:
            The first bad operation, or None if every value is finite.

        Raises:
            GradwatchError: The incident has no copy of the model or comes from a training from a config, or the model
                or the step does not fit the incident.
        """
        if (self._run / RUN_CONFIG).is_file():
            raise RunError(f"{self.path}: run it again with: gradwatch replay {self._run} --step {self.step}")
        state = self.state()
        if state["snapshot"] is None:
            raise RunError(f"{self.path}: the model was too large to be copied; {TO_COPY}")
        models = dict(model) if isinstance(model, Mapping) else {"": model}
        device = next((p.device for each in models.values() for p in each.parameters()), torch.device("cpu"))
        batch = to_device(_batch(state), device)
        _check_call(step, batch, self.path)
        with _restored(models, state, self.path):
            located = locate(step, *batch, model=models.get(""), jump=jump)
        if located is None and (doubts := self._doubts):
            warnings.warn(f"gradwatch: {doubts}", RuntimeWarning, stacklevel=2)
        return located

    @property
    def _doubts(self) -> str:
        """Reasons why a finite result need not be the result of the step; empty if there are none."""
        doubts = []
        if (copied := self.snapshot_step) != self.step:
            doubts.append(f"the model was copied before step {copied}; record=True copies it at each step")
        if (count := self.facts.get("micro_batches", 1)) > 1:
            doubts.append(f"the step had {count} micro-batches, and only the last one was saved")
        if others := rank_parts(self._run):
            steps = f"gradwatch.incidents('{next(iter(others.values()))}')"
            doubts.append(f"averaged gradients carry a NaN of another rank, whose steps are in {steps}")
        return "; ".join(doubts)

    @property
    def _run(self) -> Path:
        return self.path.parent.parent

    def __str__(self) -> str:
        command = f"gradwatch replay {self._run} --step {self.step}"
        if not (self._run / RUN_CONFIG).is_file():
            command = "incident.locate(step, model=model)"
        found = "; ".join(f"{f.severity} {f.kind} ({f.code}): {f.message}" for f in self.findings)
        return f"step {self.step:,} of {self._run}: {found}; run it again: {command}"


def incidents(run: str | os.PathLike[str]) -> Lines[Incident]:
    """Read the saved steps of a run, sorted by step. Warn about each one that cannot be read.

    A training from a config saves steps with a critical finding, or with NaN or Inf. Your own loop saves them if it is
    watched with `watch(..., record=True)`.

    Args:
        run: Run directory.

    Raises:
        RunError: `run` is not a run directory, or a run of your own loop that was watched without `record=True`.
    """
    directory = user_path(run)
    found = []
    for path in sorted((directory / FOLDER).glob("step-*")):
        if path.suffix:  # `.tmp`: the process ended while writing
            continue
        try:
            found.append(Incident.read(path))
        except RunError as error:  # one damaged incident must not hide the others
            warnings.warn(str(error), RuntimeWarning, stacklevel=2)
    if not found and not Header.read(directory).info.keeps_steps and not (directory / RUN_CONFIG).is_file():
        raise RunError(
            f"{directory}: no step was saved, because the loop was watched without record=True; call "
            f'gradwatch.watch(model, optimizer, run="{directory}", record=True), or add --record to gradwatch run, '
            "and run the loop again"
        )
    # by number: names have 6 digits, so as text step-1000000 comes before step-999999
    return Lines(sorted(found, key=lambda incident: incident.step))


def _batch(state: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the arguments of a step: the batch of the loop, or else the inputs of its first forward pass."""
    batch = state.get("batch")
    if batch is None:
        window = state["window"]
        return (*window["inputs"], *window["keywords"].values())
    return tuple(batch) if isinstance(batch, tuple | list) else (batch,)


def _check_call(step: Step, batch: tuple[Any, ...], path: Path) -> None:
    """Raise a GradwatchError if the step does not take a batch with this number of parts."""
    try:
        signature = inspect.signature(step)
    except (TypeError, ValueError):  # some built-in functions have no signature
        return
    try:
        signature.bind(*batch)
    except TypeError as error:
        raise GradwatchError(
            f"step: it takes {signature}, and the batch in {path} has {plural(len(batch), 'part')}; pass everything "
            "that the step takes to monitor.step, such as monitor.step(loss, batch=(inputs, targets)), and run the "
            "loop again"
        ) from error


def _unwrapped(saved: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return saved tensors under the names of a model that lacks a wrapper, or has one that was added later."""
    own, names = model.state_dict().keys(), dict(saved)
    for prefix in WRAPPERS:
        if names.keys() != own and {f"{prefix}{name}" for name in own} == names.keys():
            names = {name.removeprefix(prefix): tensor for name, tensor in names.items()}
        elif names.keys() != own and {f"{prefix}{name}" for name in names} == own:
            names = {f"{prefix}{name}": tensor for name, tensor in names.items()}
    return names


@contextlib.contextmanager
def _restored(models: Mapping[str, nn.Module], state: Mapping[str, Any], path: Path) -> Iterator[None]:
    """Give the models and the random generators their saved states, and put them back on exit."""
    saved = state["snapshot"]["model"]
    if saved.keys() != models.keys():
        names = ", ".join(saved) or "a single model"
        raise GradwatchError(f"model: got {', '.join(models) or 'a single model'}, expected {names}, as `watch` did")
    before = {name: copy.deepcopy(each.state_dict()) for name, each in models.items()}
    with preserved_random_state():
        try:
            for name, each in models.items():
                try:
                    each.load_state_dict(_unwrapped(saved[name], each))
                except RuntimeError as error:  # names or shapes
                    raise GradwatchError(f"model: the weights in {path} do not fit it: {error}") from error
            set_random_state(state["random"])
            yield
        finally:
            for name, each in models.items():
                each.load_state_dict(before[name])
