"""Build a training in memory at a recorded state, and run it exactly as the training loop does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch

from gradwatch.config.sections.root import Config
from gradwatch.data._randomness import seed_of
from gradwatch.errors import RunError
from gradwatch.replay.restore.ranks_in_turn import RanksInTurn
from gradwatch.replay.restore.start_state import StartState
from gradwatch.state.rng import random_state, set_random_state
from gradwatch.train import loop
from gradwatch.train.reproducible import reproducible, seed_all
from gradwatch.train.session import Session
from gradwatch.train.streams.batches import StreamBatches


@contextlib.contextmanager
def restored_session(source: StartState, config: Config) -> Iterator[Session]:
    """Yield a session that starts at a recorded state.

    Args:
        source: Recorded state at which the session begins.
        config: Config of the run.
    """
    with contextlib.ExitStack() as stack:
        # with the thread count of the run, since the last bits of a sum may depend on it
        stack.enter_context(isolated_process(config, threads=source.machine.get("threads")))
        # without workers: they do not change the batches, and starting them takes 1 s
        data = config.data.model_copy(update={"workers": 0})
        # without a time budget, so that every statistic is measured that the run may have measured; no activations of
        # several ranks, which would be mixed
        alone = {"activations_every": 0} if source.world_size > 1 else {}
        watch = config.watch.model_copy(update={"budget": 0.0} | alone)
        quiet = config.model_copy(update={"data": data, "watch": watch})
        if not source.state:  # the start of the run: the seed reproduces its initial weights
            seed_all(config.run.seed)
        session = Session(quiet, source.run, stack=stack, rerun=source.state)
        # batches that the run skipped later, after a rewind, are skipped from here too
        session.progress.bad = source.bad or session.progress.bad
        stack.callback(session.training.end_workers)
        yield session


def ranks_in_turn(session: Session, source: StartState) -> RanksInTurn | None:
    """Let a restored session run the passes of all ranks of its run, or return None if the run had only one rank.

    Args:
        session: The session, at the recorded state.
        source: The recorded state.

    Raises:
        RunError: One process cannot run the passes of all ranks.
    """
    if source.world_size == 1:
        return None
    made = f"{source.run}: {source.world_size} ranks made step {source.step}"
    if session.config.train.sync_batchnorm:
        raise RunError(f"{made} with train.sync_batchnorm, so one process cannot repeat it")
    if isinstance(session.batches, StreamBatches):
        raise RunError(f"{made} of a stream, so one process cannot read their batches")
    random_R = list(source.random) or [random_state()]
    for rank in range(len(random_R), source.world_size):  # without a part in the checkpoint: as at its first step
        torch.manual_seed(seed_of(session.config.run.seed, source.begins_at, rank))
        random_R.append(random_state())
    set_random_state(random_R[0])
    ranks = RanksInTurn(session.training, random_R)
    session.stepper.passes = ranks.passes
    return ranks


def run_until(session: Session, step: int) -> None:
    """Run a session until just before a step, or until the training ends."""
    if session.progress.step < step:
        loop.run(session, _Until(session, step))


@final
@dataclass(frozen=True, slots=True)
class _Until:
    """Requests the end of the loop before a step."""

    session: Session
    step: int

    @property
    def requested(self) -> bool:
        return self.session.progress.step >= self.step


@contextlib.contextmanager
def isolated_process(config: Config, *, threads: int | None) -> Iterator[None]:
    """Use the threads and algorithms of a config, and restore the settings and random generators on exit.

    Args:
        config: Config of the training.
        threads: Number of threads if the config does not set it; None to keep the number of this process.
    """
    threads_before, generators_before = torch.get_num_threads(), random_state()
    torch.set_num_threads(config.train.threads or threads or threads_before)
    try:
        with reproducible(config.run.seed) if config.run.deterministic else contextlib.nullcontext():
            yield
    finally:
        torch.set_num_threads(threads_before)
        set_random_state(generators_before)
