"""Record each rank in its own part of the run directory, and compare the ranks on rank 0."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gradwatch.events import RANK_LOSS_NONFINITE
from gradwatch.history.disk import ranks as rank_parts
from gradwatch.history.disk.writer import Writer
from gradwatch.history.store import History
from gradwatch.monitor import total_norm
from gradwatch.monitor.ranks.reader import RankReader
from gradwatch.pipeline.pipeline import Pipeline
from gradwatch.pipeline.ranks.alignment import Alignment
from gradwatch.pipeline.ranks.comparison import RankComparison
from gradwatch.pipeline.ranks.shards import ShardJoin
from gradwatch.records import RunInfo
from gradwatch.train.parallel.ranks import Ranks

WAIT_S = 0.01
"""Seconds between two checks for the rows of other ranks."""


def part_of(directory: Path, ranks: Ranks | None) -> Path:
    """Return the directory that this rank records in: the run directory, or a folder in it."""
    return directory if ranks is None else rank_parts.part_of(directory, ranks.rank)


def open_history(
    info: RunInfo, saved: Mapping[str, Any] | None, *, folder: Path, step: int, groups: int
) -> tuple[Writer, History]:
    """Begin the history of a run, or continue the one in a folder.

    Args:
        info: Description of the run as it is now.
        saved: State that the training continues from, or None at the start. It has no history for a rank that was not
            part of the training before.
        folder: Folder that this rank records in.
        step: The next step.
        groups: Number of param groups.
    """
    if not saved or "history" not in saved:
        history = History(info, groups=groups)
        if saved:
            history.start_at(step)
            _set_aside(folder)
        return Writer(folder, history), history
    writer, history = Writer.resume(folder, step=step - 1)
    history.restore(saved["history"])
    # a resume may have changed train.steps, train.epochs or the number of ranks, and older runs lack the data
    history.info = replace(
        history.info,
        total_steps=info.total_steps,
        data=info.data,
        steps_per_epoch=info.steps_per_epoch,
        settings=info.settings,
        world_size=info.world_size,
        shards=info.shards,
    )
    return writer, history


def complete_rows(pipeline: Pipeline, ranks: Ranks | None) -> None:
    """Wait until the rows of all steps are ingested; rows of sharded parameters need the parts of all ranks."""
    pipeline.finish()
    if ranks:
        ranks.any(False)  # each rank has written its rows
        while pipeline.is_holding:
            time.sleep(WAIT_S)
            pipeline.finish()


def _set_aside(folder: Path) -> None:
    """Rename the recordings of an earlier rank of this number, if there are any."""
    if folder.exists():
        names = (folder.with_name(f"{folder.name}.earlier-{number}") for number in itertools.count(1))
        folder.rename(next(name for name in names if not name.exists()))


def comparison(
    directory: Path, history: History, ranks: Ranks | None
) -> tuple[RankComparison | None, ShardJoin | None]:
    """Return the objects with which rank 0 compares the ranks and joins sharded statistics, or None on other ranks."""
    if ranks is None or not ranks.is_first:
        return None, None
    alignment = Alignment(directory, history)
    shards = ShardJoin(alignment, history, total_norm) if history.info.shards else None
    return RankComparison(alignment, history, has_own_batches=True), shards


def reader(
    model: nn.Module, optimizer: torch.optim.Optimizer, pipeline: Pipeline, ranks: Ranks | None
) -> RankReader | None:
    """Return the reader of the facts by which the ranks are compared, or None with one process."""
    if ranks is None:
        return None
    return RankReader({"": model}, [optimizer], pipeline.add_event, pipeline.attempts, pipeline.next_step)


def report_sources(pipeline: Pipeline, step: int, sources: Sequence[int]) -> None:
    """Emit the rank where the first NaN or Inf came from, unless all ranks had one at once.

    Args:
        pipeline: The pipeline of rank 0.
        step: The step.
        sources: By rank: 0 if its loss is finite, 1 if only its inputs are, 2 if neither is.
    """
    if not any(sources) or all(sources):
        return  # the recorded loss is of all ranks, so the rows do not show which rank it was
    if not any(event.kind == RANK_LOSS_NONFINITE.name for event in pipeline.history.events):
        rank = next(rank for rank, source in enumerate(sources) if source)
        pipeline.add_event(RANK_LOSS_NONFINITE.emit(step=step, values={"rank": rank, "inputs": sources[rank] - 1}))
