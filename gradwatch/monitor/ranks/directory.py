"""Open one run directory for all ranks of a distributed training, without a collective."""

from __future__ import annotations

import datetime
import warnings
from collections import Counter
from pathlib import Path

import torch.distributed as dist

from gradwatch.history.disk.ranks import part_of
from gradwatch.monitor.setup.run_directory import OpenRun, open_run
from gradwatch.paths import user_path
from gradwatch.records import RunInfo

WAIT = datetime.timedelta(seconds=20)
"""Maximum time for which a rank waits for rank 0 to call `watch` with the same run."""

_calls: Counter[str] = Counter()


def rank_and_world_size() -> tuple[int, int]:
    """Return the rank of this process and the number of ranks; (0, 1) without torch.distributed."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def open_shared_run(
    run: str | Path | None, info: RunInfo, *, groups: int, resume: bool | int = False, overwrite: bool = False
) -> OpenRun:
    """Open the run directory of rank 0, or the part of another rank in it; see `open_run`.

    The name goes through the key-value store of torch.distributed, since rank 0 may have to take another name. A rank
    waits for the name at most `WAIT`, and then keeps its history in memory, with a warning. Rank 0 waits for no other
    rank, so `watch` may be called on rank 0 only.
    """
    directory = user_path(run) if run else None
    if directory is None or info.world_size == 1:
        return open_run(directory, info, groups=groups, resume=resume, overwrite=overwrite)
    _calls[str(run)] += 1
    key = f"gradwatch/{run}/{_calls[str(run)]}"
    store = dist.distributed_c10d._get_default_store()  # there is no public name
    if info.rank == 0:
        opened = open_run(directory.absolute(), info, groups=groups, resume=resume, overwrite=overwrite)
        store.set(key, str(opened.directory))
        return opened
    try:
        store.wait([key], WAIT)
        part = part_of(Path(store.get(key).decode()), info.rank)
    except RuntimeError as error:  # DistError is one
        text = f"rank {info.rank} keeps its history in memory: rank 0 has not called watch(run={str(run)!r}) ({error})"
        warnings.warn(f"gradwatch: {text}", RuntimeWarning, stacklevel=4)
        part = None
    return open_run(part, info, groups=groups, resume=resume, overwrite=overwrite)
