"""Bring a training to a step: the first one of a config, or a recorded one of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from gradwatch.config.load import load_config
from gradwatch.errors import RunError
from gradwatch.history.disk.writer import read
from gradwatch.replay.restore.restored_session import isolated_process
from gradwatch.replay.restore.restored_step import restore_step
from gradwatch.train import checkpoint
from gradwatch.train.data_position import numbered, positions
from gradwatch.train.reproducible import seed_all
from gradwatch.train.step import Batch
from gradwatch.train.training_state import TrainingState


@contextlib.contextmanager
def first_step(file: Path, overrides: Sequence[str]) -> Iterator[tuple[TrainingState, list[Batch]]]:
    """Yield the training that a config describes and the micro-batches of its first step, without starting a run."""
    config = load_config(file, overrides, is_new=True)
    config = config.model_copy(update={"data": config.data.model_copy(update={"workers": 0})})
    with isolated_process(config, threads=None):
        seed_all(config.run.seed)
        training = TrainingState.build(config)
        try:
            batches = numbered(training.batches)
            first = next(positions(batches, accumulate=config.train.accumulate, epoch=0, batch=0))
            yield training, first.read(batches)
        finally:
            training.end_workers()


@contextlib.contextmanager
def recorded_step(run: Path, step: int | None) -> Iterator[tuple[int, TrainingState, list[Batch]]]:
    """Yield the number, the training and the micro-batches of a step of a run, with the weights from before it.

    Args:
        run: The run directory.
        step: The step, or None for the one after the newest checkpoint.
    """
    if step is None:
        if not (run / "config.yaml").is_file():
            raise RunError(f"{run}: not a run of `gradwatch train`: it has no config.yaml")
        recorded = read(run).step
        step = max((s for s in checkpoint.steps(run / "checkpoints") if s <= recorded), default=0)
    with restore_step(run, step) as restored:
        restored.restore()
        yield step, restored.training, restored.window
