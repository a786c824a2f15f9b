"""Find the parts of the other ranks in the run directory of a distributed training, and describe their progress."""

from __future__ import annotations

from pathlib import Path

from gradwatch.errors import RunError
from gradwatch.history.disk.header import NAME
from gradwatch.history.disk.run_summary import summarize
from gradwatch.history.store import History

FOLDER = "ranks"
"""Folder of a run directory with a run directory for each rank but the first."""
MAX_NAMED = 3
"""Maximum number of ranks that are named one by one."""


def part_of(directory: Path, rank: int) -> Path:
    """Return the directory of a rank: the run directory itself for rank 0."""
    return directory / FOLDER / str(rank) if rank else directory


def rank_parts(directory: Path) -> dict[int, Path]:
    """Return the run directories of the other ranks that have written one, by rank."""
    found = [path.parent for path in (directory / FOLDER).glob(f"*/{NAME}") if path.parent.name.isdecimal()]
    return {int(path.name): path for path in sorted(found, key=lambda path: int(path.name))}


def saved_steps(directory: Path) -> list[int]:
    """Return the steps of a run that were saved as incidents, in increasing order."""
    names = (path.name.removeprefix("step-") for path in (directory / "incidents").glob("step-*"))
    return sorted(int(name) for name in names if name.isdecimal())


def name_of(directory: Path, rank: int) -> str:
    """Return the name of the run in a directory, or of the part of a rank in it."""
    return f"{directory.parents[1].name} (rank {rank})" if rank else directory.name


def ranks_text(history: History) -> str:
    """Return how many ranks a run has, and which of them are missing or ended otherwise; empty for one process."""
    world_size, rank = history.info.world_size, history.info.rank
    if world_size == 1 or history.directory is None:
        return ""
    if rank:
        return f"rank {rank} of {world_size}"
    parts = rank_parts(history.directory)
    differences = {other: _difference(history, parts.get(other)) for other in range(1, world_size)}
    odd = [f"rank {other} {text}" for other, text in differences.items() if text]
    more = [f"{len(odd) - MAX_NAMED} more differ"] if len(odd) > MAX_NAMED else []
    return "; ".join([f"{world_size} ranks", *odd[:MAX_NAMED], *more])


def _difference(history: History, part: Path | None) -> str:
    """Return how the part of a rank differs from the run of rank 0, such as `killed at step 40`, or nothing."""
    if part is None:
        return "has no record"
    try:
        summary = summarize(part)
    except RunError:
        return "has a damaged record"
    # a rank that still runs may be about to end
    is_whole = summary.ending.kind == "finished" and summary.steps == history.step + 1
    return "" if is_whole or summary.ending.kind == "running" else summary.ending.sentence(summary.steps)
