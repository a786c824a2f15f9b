"""Restore a training to the state before one of its steps, any number of times."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

from gradwatch.config.load import load_config
from gradwatch.errors import RunError
from gradwatch.paths import RUN_CONFIG
from gradwatch.replay.restore.ranks_in_turn import RanksInTurn
from gradwatch.replay.restore.restored_session import ranks_in_turn, restored_session, run_until
from gradwatch.replay.restore.start_state import find_start_state
from gradwatch.state.rng import set_random_state
from gradwatch.state.snapshot import Snapshot
from gradwatch.train.parallel.parts import Indices
from gradwatch.train.recovery.incidents import position_of
from gradwatch.train.session import Session
from gradwatch.train.step import Batch, Stepper
from gradwatch.train.streams.batches import StreamBatches


@contextlib.contextmanager
def restore_step(run: Path, step: int, *, of_ranks: bool = False) -> Iterator[RestoredStep]:
    """Restore a training to the state before a step, by rerunning the steps since an earlier recorded state.

    Args:
        run: The run directory.
        step: Optimizer step.
        of_ranks: Whether a step that several ranks have made is accepted.

    Raises:
        RunError: The run or the step does not exist, or the replay ended before the step.
    """
    source = find_start_state(run, step, of_ranks=of_ranks)
    with restored_session(source, load_config(run / RUN_CONFIG)) as session:
        ranks = ranks_in_turn(session, source)
        run_until(session, source.step)
        if session.progress.step != source.step:
            raise RunError(
                f"{run}: the replay from step {source.begins_at} ended before step {session.progress.step}, "
                f"expected to reach step {source.step}; the config or the data have changed since the run"
            )
        yield RestoredStep(session, ranks)


@final
class RestoredStep:
    """A training in the state before a step, which can be restored in place.

    Args:
        session: The training, just before the step; its monitor is detached.
        ranks: The ranks that made the step, or None if one process did. Begins with rank 0; `turn_to` changes the rank.

    Attributes:
        config: Config of the training.
        step: The next step.
        training: The model, the optimizer and the other parts of the training.
        window: Micro-batches of the step, as the training read them.
        indices: Indices of the samples of each micro-batch in the training data.
        shares: Factor of the loss of each micro-batch in the loss of the step.
    """

    def __init__(self, session: Session, ranks: RanksInTurn | None = None) -> None:
        if session.monitor:  # experiments with the step must not be recorded
            session.monitor.detach()
        self.config = session.config
        self.step = session.progress.step
        self.training = session.training
        # saved here, since a state dict does not contain the modes
        self._modes = [module.training for module in self.training.model.modules()]
        self._before = Snapshot()
        self._before.take(session.state())
        # needs the progress in the snapshot
        self.window: list[Batch]
        self.indices: list[Indices]
        self.window, self.indices = self._window(0)
        self.shares = self.training.objective.shares(self.window)
        self._ranks, self._random = ranks, self._before.read()["random"]
        if ranks:
            self.turn_to(0)

    @property
    def world_size(self) -> int:
        """Number of ranks that made the step."""
        return self._ranks.world_size if self._ranks else 1

    def turn_to(self, rank: int) -> None:
        """Take the micro-batches, shares and random numbers of a rank."""
        assert self._ranks, "called for a step of several ranks"
        window, indices = self._window(0)
        window_RK = [self._ranks.window_of(each, window) for each in range(self.world_size)]
        self.window, self.indices = window_RK[rank], [self._ranks.part(rank).of(indices_B) for indices_B in indices]
        self.shares = self._ranks.weights(self.stepper(), window_RK)[rank]
        self._random = self._ranks.random_R[rank]

    def restore(self) -> None:
        """Restore weights, buffers, optimizer, schedule, scaler, random generators and modes from before the step."""
        saved: dict[str, Any] = self._before.read()
        self.training.load(saved)
        for module, is_training in zip(self.training.model.modules(), self._modes, strict=True):
            module.training = is_training
        for parameter in self.training.model.parameters():
            parameter.grad = None  # gradients are not part of the saved state
        set_random_state(self._random)

    def stepper(self, **changes: Any) -> Stepper:
        """Return the stepper of the run with changed fields, such as `precision="fp32"`."""
        return dataclasses.replace(self.training.stepper(), **changes)

    def window_at(self, offset: int) -> list[Batch]:
        """Return the micro-batches of a later step.

        Args:
            offset: Number of steps after this step, not negative.
        """
        return self._window(offset)[0]

    def _window(self, offset: int) -> tuple[list[Batch], list[Indices]]:
        batches, accumulate = self.training.batches, self.config.train.accumulate
        if isinstance(batches, StreamBatches):
            read = batches.ahead(offset * accumulate, accumulate)
            return [batch for batch, _ in read], [numbers_B for _, numbers_B in read]
        position = position_of(self.training, self.step + offset, since=self._before.read()["progress"])
        return position.read(batches), position.indices(batches)
