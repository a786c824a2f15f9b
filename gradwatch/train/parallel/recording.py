"""Record each rank in its own part of the run directory, and compare the ranks on rank 0."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from gradwatch.history.disk import ranks as rank_parts
from gradwatch.history.store import History
from gradwatch.monitor.ranks.reader import RankReader
from gradwatch.pipeline.pipeline import Pipeline
from gradwatch.pipeline.ranks.comparison import RankComparison
from gradwatch.train.parallel.ranks import Ranks


def part_of(directory: Path, ranks: Ranks | None) -> Path:
    """Return the directory that this rank records in: the run directory, or a folder in it."""
    return directory if ranks is None else rank_parts.part_of(directory, ranks.rank)


def comparison(directory: Path, history: History, ranks: Ranks | None) -> RankComparison | None:
    """Return the comparison of all ranks, which rank 0 makes, or None."""
    if ranks is None or not ranks.is_first:
        return None
    return RankComparison(directory, history, has_own_batches=True)


def reader(
    model: nn.Module, optimizer: torch.optim.Optimizer, pipeline: Pipeline, ranks: Ranks | None
) -> RankReader | None:
    """Return the reader of the facts that the ranks are compared by, or None with one process."""
    return RankReader({"": model}, [optimizer], pipeline.add_event, pipeline.attempts) if ranks else None
