"""A training brought back to the state before one of its steps, as often as one likes."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, final

from gradwatch.config.load import load_config
from gradwatch.config.sections.root import Config
from gradwatch.errors import RunError
from gradwatch.incident import Incident
from gradwatch.replay.restore.restored_session import restored_session, run_until
from gradwatch.replay.restore.start_state import StartState, find_start_state
from gradwatch.state.rng import set_random_state
from gradwatch.state.snapshot import Snapshot
from gradwatch.train import loop
from gradwatch.train.batches import Indices
from gradwatch.train.data_position import Position, positions
from gradwatch.train.session import Session
from gradwatch.train.step import Batch, Stepper, StepResult


@contextlib.contextmanager
def restore_step(run: Path, step: int | None = None, config: Config | None = None) -> Iterator[RestoredStep]:
    """Bring a training back to the state before a step, by running again the steps between a kept state and it.

    Args:
        run: The run directory.
        step: The step; None is that of the first incident.
        config: A changed config to make the step with; what comes before it is run again with the run's own. At
            step 0 it draws its own weights.

    Raises:
        RunError: There is no such run or step.
        CheckpointError: The state does not fit the changed config.
    """
    source = find_start_state(run, step)
    with contextlib.ExitStack() as stack:
        if config is None or source.step:
            session = stack.enter_context(restored_session(source, load_config(run / "config.yaml")))
            _reach(source, session)
        if config is not None:
            moved = dataclasses.replace(source, state=session.state() if source.step else {})
            session = stack.enter_context(restored_session(moved, config))
        yield RestoredStep(source, session)


def _reach(source: StartState, session: Session) -> None:
    run_until(session, source.step)
    if session.progress.step != source.step:
        raise RunError(
            f"{source.run}: ran again from step {source.begins_at}, and it ended before step {session.progress.step}, "
            f"expected to get to step {source.step}; the config or the data have changed since"
        )


@final
class RestoredStep:
    """A training that stands before a step. Everything is done in place, so that its objects stay the same.

    Args:
        source: Where it came from.
        session: The training, which stands before the step; its monitor is taken off.

    Attributes:
        run: The run directory.
        config: What the objects were built from.
        step: The step that it stands before.
        began_at: The step of the state that was kept; those from there on were run again.
        incident: What was written about the step, or None.
        live: The model, optimizer and all else.
        window: The step's micro-batches, as the training read them.
        indices: Which samples of the training data each of them has.
    """

    def __init__(self, source: StartState, session: Session) -> None:
        if session.monitor:
            session.monitor.detach()
        self.run = source.run
        self.config = session.config
        self.step = source.step
        self.start_step = source.begins_at
        self.incident: Incident | None = source.incident
        self.training = session.training
        self._session = session
        self._before = self.state()
        position = self.position(0)
        self.window: list[Batch] = position.read(self.training.batches)
        self.indices: list[Indices] = position.indices(self.training.batches)

    def state(self) -> Snapshot:
        """Return a copy of everything that `restore` puts back, as it is now."""
        snapshot = Snapshot()
        modes = [module.training for module in self.training.model.modules()]
        snapshot.take(self._session.state() | {"modes": modes})
        return snapshot

    def set_state(self, state: Snapshot) -> None:
        """Put back what `state` returned: weights, buffers, optimizer, schedule, scaler, random generators, modes."""
        saved: dict[str, Any] = state.read()
        self.training.load(saved)
        for module, is_training in zip(self.training.model.modules(), saved["modes"], strict=True):
            module.training = is_training
        for parameter in self.training.model.parameters():
            parameter.grad = None
        set_random_state(saved["random"])

    def restore(self) -> None:
        """Go back to the state before the step."""
        self.set_state(self._before)

    def stepper(self, **changes: Any) -> Stepper:
        """Return what makes the run's steps, with some of its fields changed, such as `precision="fp32"`."""
        return dataclasses.replace(self.training.stepper(), **changes)

    def run_step(self, window: Sequence[Batch] | None = None, *, stepper: Stepper | None = None) -> StepResult:
        """Make the step from the state as it stands, and return what it came to. Schedule and place stay.

        Args:
            window: Other micro-batches than its own.
            stepper: Another way to make it, see `stepper`.
        """
        return (stepper or self.stepper()).run(self.window if window is None else window)

    def forward_backward(
        self, window: Sequence[Batch] | None = None, *, stepper: Stepper | None = None
    ) -> tuple[float, bool]:
        """Do the forward and backward passes of the step alone, and leave the gradients, times the loss scale.

        Returns:
            The loss, and whether that is finite.
        """
        return (stepper or self.stepper()).backward(self.window if window is None else window)

    def run_on(self, steps: int, *, stepper: Stepper | None = None) -> list[StepResult]:
        """Make further steps as the loop makes them, from the state as it stands; nothing is evaluated between them."""
        chosen = stepper or self.stepper()
        results = []
        for _ in range(steps):
            window = next(self._positions()).read(self.training.batches)
            result = chosen.run(window)
            results.append(result)
            loop.advance(self._session, len(window), 0.0)
            loop.move_schedule(self._session, result, None)
        return results

    def window_at(self, offset: int) -> list[Batch]:
        """Return the micro-batches of a step so many after this one, or before it: of this epoch, then."""
        return self.position(offset).read(self.training.batches)

    def position(self, offset: int) -> Position:
        """Return where a step so many after this one stands in the data, or before it."""
        progress = self._before.read()["progress"]
        epoch, batch, bad = progress["epoch"], progress["batch"], progress["bad"]
        accumulate = self.config.train.accumulate
        steps = positions(self.training.batches, accumulate=accumulate, epoch=epoch, batch=batch, bad=bad)
        if offset >= 0:
            return next(itertools.islice(steps, offset, None))
        earlier = positions(self.training.batches, accumulate=accumulate, epoch=epoch, batch=0, bad=bad)
        before = list(itertools.takewhile(lambda p: (p.epoch, p.batch) < (epoch, batch), earlier))
        if -offset > len(before):
            raise IndexError(f"the epoch has {len(before)} steps before step {self.step}, got offset {offset}")
        return before[offset]

    def _positions(self) -> Iterator[Position]:
        progress = self.training.progress
        return positions(
            self.training.batches,
            accumulate=self.config.train.accumulate,
            epoch=progress.epoch,
            batch=progress.batch,
            bad=progress.bad,
        )
