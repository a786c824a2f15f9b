"""Find the recorded state nearest before an illness, and the changes that can be made there."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from gradwatch.config.sections.root import Config
from gradwatch.errors import GradwatchError
from gradwatch.history.disk.writer import read
from gradwatch.history.store import History
from gradwatch.incident import incidents
from gradwatch.replay.config_change import config_of
from gradwatch.train import checkpoint
from gradwatch.train.recovery.recover import scale_learning_rates
from gradwatch.train.session import Session

OF_ANY_STEP = ("data.batch_size", "loss", "model.dropout", "train.accumulate", "train.clip", "train.precision")
"""Beginnings of keys of settings that can change at any step. Other model settings decide the first weights."""
OF_THE_OPTIMIZER = ("lr", "weight_decay", "betas", "momentum", "eps")
"""Settings of an optimizer that can change at any step: its state has the same form."""
RATE = "lr"
DRIVING = "max_lr"
"""Option of schedules that drive the learning rate whatever `optim.lr` says."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStart:
    """A state of a run from which further trainings begin.

    Args:
        run: The run directory.
        state: As `Session.state` gave it.
    """

    run: Path
    state: Mapping[str, Any]

    @property
    def step(self) -> int:
        """The step before which it was taken."""
        return int(self.state["progress"]["step"])

    def history(self) -> History:
        """Return what was recorded before that step, in a history of its own."""
        return read(self.run, until=self.step - 1)

    def supports(self, patch: Mapping[str, Any]) -> bool:
        """Return whether a change can be made at this state: first weights and seeds, for example, act at the start."""
        config = config_of(self.run)
        return all(_is_of_any_step(key, value, config) for key, value in patch.items())

    def open(self, config: Config, folder: Path, *, stack: contextlib.ExitStack) -> Session:
        """Return a session with a changed config that stands at the state, with detectors that know what was before."""
        old = config_of(self.run)
        state = dict(self.state)
        if config.train.scaler != old.train.scaler:
            state["scaler"] = None
        session = Session(config, folder, stack=stack, rerun=state, past=self.history())
        _set_optimizer(session, old)
        if config.data.batch_size != old.data.batch_size:
            _move(session, old.data.batch_size)
        return session


def find_warm_start(run: Path, step: int) -> WarmStart | None:
    """Return the newest state of a run from before a step or at it, an incident's or a checkpoint; None for none.

    That of step 0 is the start of the run; one whose last steps have been thinned away on disk is passed over.
    """
    known: dict[int, Any] = {}
    root = run / "checkpoints"
    known |= {number: ("checkpoint", number) for number in checkpoint.steps(root)}
    known |= {one.snapshot_step: ("incident", one) for one in incidents(run) if one.snapshot_step is not None}
    for number in sorted((n for n in known if 0 < n <= step), reverse=True):
        kind, source = known[number]
        try:
            state = checkpoint.load(root, step=number)[1] if kind == "checkpoint" else source.state()["snapshot"]
        except GradwatchError as error:  # damaged: the one before will do
            warnings.warn(str(error), RuntimeWarning, stacklevel=2)
            continue
        found = WarmStart(run=run, state=state)
        if found.history().step == number - 1:
            return found
    return None


def _is_of_any_step(key: str, value: Any, config: Config) -> bool:
    section, _, name = key.partition(".")
    is_driven = DRIVING in config.schedule.options
    if section == "schedule":
        return key == section and value is None and not is_driven
    if section != "optim":
        return key.startswith((*OF_ANY_STEP, "train.scaler"))
    has_own = any(name in group.options for group in config.optim.groups)
    if name == RATE and (is_driven or RATE not in config.optim.options):
        return False
    return name in OF_THE_OPTIMIZER and not has_own


def _set_optimizer(session: Session, old: Config) -> None:
    """Set the changed settings of an optimizer again: loading has restored the old ones."""
    new, optimizer = session.config, session.optimizer
    for name in OF_THE_OPTIMIZER:
        if name != RATE and new.optim.options.get(name) != old.optim.options.get(name):
            for group in optimizer.param_groups:
                group[name] = optimizer.defaults[name]
    if RATE in old.optim.options:
        scale_learning_rates(session, new.optim.options[RATE] / old.optim.options[RATE])
    if old.schedule.name and not new.schedule.name:
        for group in optimizer.param_groups:
            group[RATE] = group.pop("initial_lr", group[RATE])


def _move(session: Session, batch_size: int) -> None:
    """Move to the same sample of the epoch after a change of the batch size."""
    progress = session.progress
    progress.batch, progress.bad = progress.batch * batch_size // session.config.data.batch_size, []
    if progress.batch >= len(session.batches):
        progress.epoch, progress.batch = progress.epoch + 1, 0
