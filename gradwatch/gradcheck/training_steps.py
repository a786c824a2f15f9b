"""Bring a training to a step: the first one of a config, or a recorded one of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from gradwatch.config.load import load_config
from gradwatch.errors import RunError
from gradwatch.gradcheck.options import CheckTarget
from gradwatch.history.disk.writer import read
from gradwatch.paths import RUN_CONFIG
from gradwatch.replay.restore.restored_session import isolated_process
from gradwatch.replay.restore.restored_step import restore_step
from gradwatch.train import checkpoint
from gradwatch.train.data_position import numbered, positions
from gradwatch.train.reproducible import seed_all
from gradwatch.train.step import Batch
from gradwatch.train.training_state import TrainingState

Step = tuple[TrainingState, list[Batch], tuple[str, ...]]


@contextlib.contextmanager
def training_step(target: CheckTarget) -> Iterator[Step]:
    """Yield a training, the micro-batches of one of its steps, and notes that name the step.

    For a config, it is the first step, and no run is started. For a run, the weights are those before the step.
    """
    with _recorded_step(target.path, target.step) if target.kind == "run" else _first_step(target) as found:
        yield found


@contextlib.contextmanager
def _first_step(target: CheckTarget) -> Iterator[Step]:
    config = load_config(target.path, target.overrides, is_new=True)
    config = config.model_copy(update={"data": config.data.model_copy(update={"workers": 0})})
    with isolated_process(config, threads=None):
        seed_all(config.run.seed)
        training = TrainingState.build(config)
        try:
            batches = numbered(training.batches)
            first = next(positions(batches, accumulate=config.train.accumulate, epoch=0, batch=0))
            yield training, first.read(batches), ()
        finally:
            training.end_workers()


@contextlib.contextmanager
def _recorded_step(run: Path, step: int | None) -> Iterator[Step]:
    if step is None:
        if not (run / RUN_CONFIG).is_file():
            raise RunError(f"{run}: not a run of `gradwatch train`: it has no config.yaml")
        recorded = read(run).step
        step = max((s for s in checkpoint.steps(run / "checkpoints") if s <= recorded), default=0)
    with restore_step(run, step) as restored:
        restored.restore()
        yield restored.training, restored.window, (f"step {step} of {run}",)
