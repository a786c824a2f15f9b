"""Set a training up again at a recorded state, in memory, and run it on exactly as the loop does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch

from gradwatch.config.sections.root import Config
from gradwatch.replay.restore.start_state import StartState
from gradwatch.state.rng import random_state, set_random_state
from gradwatch.train import loop
from gradwatch.train.reproducible import reproducible, seed_all
from gradwatch.train.session import Session


@contextlib.contextmanager
def restored_session(source: StartState, config: Config) -> Iterator[Session]:
    """Yield a session that stands where the source's state does; this process' own random numbers stay as they were.

    Args:
        source: Where it begins.
        config: The run's, or one with a change to be tried.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_kept_threads(source, config))
        stack.enter_context(reproducible(config.run.seed) if config.run.deterministic else _kept_generators())
        # workers make no difference to what is read, and to begin with them takes a second
        data = config.data.model_copy(update={"workers": 0})
        watch = config.watch.model_copy(update={"budget": 0.0})  # all that the run may have measured is measured
        quiet = config.model_copy(update={"data": data, "watch": watch})
        if not source.state:
            seed_all(config.run.seed)
        session = Session(quiet, source.run, stack=stack, rerun=source.state)
        session.progress.bad = source.bad or session.progress.bad
        stack.callback(session.training.end_workers)
        yield session


def run_until(session: Session, step: int) -> None:
    """Run a session on until it stands before a step, or until it ends by itself."""
    if session.progress.step < step:
        loop.run(session, _Until(session, step))


@final
@dataclass(frozen=True, slots=True)
class _Until:
    """Asks the loop to end before a step."""

    session: Session
    step: int

    @property
    def requested(self) -> bool:
        return self.session.progress.step >= self.step


@contextlib.contextmanager
def _kept_generators() -> Iterator[None]:
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)


@contextlib.contextmanager
def _kept_threads(source: StartState, config: Config) -> Iterator[None]:
    """Use as many threads as the run did: a sum's last bits may depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(config.train.threads or source.machine.get("threads", before))
    try:
        yield
    finally:
        torch.set_num_threads(before)
