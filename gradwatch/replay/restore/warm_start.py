"""Find the newest recorded state before a problem, and check which changes can be made at this state."""

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
from gradwatch.replay.config_change import config_of
from gradwatch.replay.incident import incidents
from gradwatch.train import checkpoint
from gradwatch.train.batches import Batches
from gradwatch.train.recovery.recover import scale_learning_rates
from gradwatch.train.session import Session

ANY_STEP_SETTINGS = ("data.batch_size", "loss", "model.dropout", "train.accumulate", "train.clip", "train.precision")
"""Key prefixes of settings that can change at any step. Other model settings determine the initial weights."""
OPTIMIZER_SETTINGS = ("lr", "weight_decay", "betas", "momentum", "eps")
"""Optimizer settings that can change at any step: the structure of the optimizer state does not depend on them."""
RATE = "lr"
MAX_RATE = "max_lr"
"""Option of schedules that set the learning rate independently of `optim.lr`."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStart:
    """A recorded state of a run from which trials begin.

    Args:
        run: The run directory.
        state: State from `Session.state`.
    """

    run: Path
    state: Mapping[str, Any]

    @property
    def step(self) -> int:
        """Step before which the state was copied."""
        return int(self.state["progress"]["step"])

    def history(self) -> History:
        """Read the history before the step of the state."""
        # read again for every trial, since a trial appends to its history
        return read(self.run, until=self.step - 1)

    def supports(self, patch: Mapping[str, Any]) -> bool:
        """Return whether a change can be made at this state. Seeds, for example, only act at the start of a run."""
        config = config_of(self.run)
        return all(_is_of_any_step(key, value, config) for key, value in patch.items())

    def open(self, config: Config, folder: Path, *, stack: contextlib.ExitStack) -> Session:
        """Open a session with a changed config at this state, with detectors that know the history before it.

        Args:
            config: The changed config.
            folder: Run directory of the session.
            stack: Exit stack for the files and hooks of the session.
        """
        old = config_of(self.run)
        state = dict(self.state)
        if config.train.scaler != old.train.scaler:
            state["scaler"] = None  # its loss scale would replace the changed settings
        session = Session(config, folder, stack=stack, rerun=state, past=self.history())
        _set_optimizer(session, old)  # after the session has loaded the old state
        # the position in a stream counts samples, so it needs no change
        if config.data.batch_size != old.data.batch_size and isinstance(session.batches, Batches):
            _move(session, session.batches, old.data.batch_size)
        return session


def find_warm_start(run: Path, step: int) -> WarmStart | None:
    """Find the newest state of a run at or before a step, from an incident or a checkpoint; None if there is none.

    The state before step 0 does not count, since it is the start of the run. A state is skipped if the history of
    its last steps has been thinned out on disk.
    """
    known: dict[int, Any] = {}
    root = run / "checkpoints"
    known |= {number: ("checkpoint", number) for number in checkpoint.steps(root)}
    known |= {one.snapshot_step: ("incident", one) for one in incidents(run) if one.snapshot_step is not None}
    for number in sorted((n for n in known if 0 < n <= step), reverse=True):
        kind, source = known[number]
        try:
            state = checkpoint.load(root, step=number)[1] if kind == "checkpoint" else source.state()["snapshot"]
        except GradwatchError as error:  # damaged: an older state works too, with more steps to train
            warnings.warn(str(error), RuntimeWarning, stacklevel=2)
            continue
        found = WarmStart(run=run, state=state)
        if found.history().step == number - 1:  # detectors need the history without a gap
            return found
    return None


def _is_of_any_step(key: str, value: Any, config: Config) -> bool:
    section, _, name = key.partition(".")
    sets_rate = MAX_RATE in config.schedule.options
    if section == "schedule":  # only removed: the recorded state does not fit another schedule
        return key == section and value is None and not sets_rate
    if section != "optim":
        return key.startswith((*ANY_STEP_SETTINGS, "train.scaler"))
    # a group with its own value does not follow the setting of the optimizer
    has_own = any(name in group.options for group in config.optim.groups)
    # the rate is changed by a factor, so the old rate must be known
    if name == RATE and (sets_rate or RATE not in config.optim.options):
        return False
    return name in OPTIMIZER_SETTINGS and not has_own


def _set_optimizer(session: Session, old: Config) -> None:
    """Set the changed settings of an optimizer again, since loading the state has restored the old ones."""
    new, optimizer = session.config, session.optimizer
    for name in OPTIMIZER_SETTINGS:
        if name != RATE and new.optim.options.get(name) != old.optim.options.get(name):
            for group in optimizer.param_groups:
                group[name] = optimizer.defaults[name]  # from the new config; loading does not change the defaults
    # scaled, not set: the current rate depends on the position in the schedule
    if RATE in old.optim.options:
        scale_learning_rates(session, new.optim.options[RATE] / old.optim.options[RATE])
    # without a schedule, the rate is constant at its initial value
    if old.schedule.name and not new.schedule.name:
        for group in optimizer.param_groups:
            group[RATE] = group.pop("initial_lr", group[RATE])


def _move(session: Session, batches: Batches, batch_size: int) -> None:
    """Set the position in the epoch to the same sample after a change of the batch size."""
    progress = session.progress
    # skipped batches are identified by batch number, so the list is void for another batch size
    progress.batch, progress.bad = progress.batch * batch_size // session.config.data.batch_size, []
    if progress.batch >= len(batches):  # larger batches may not fill the rest of the epoch
        progress.epoch, progress.batch = progress.epoch + 1, 0
