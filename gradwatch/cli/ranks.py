"""Start the ranks of a training with torchrun, say which rank was killed, and let only one rank print."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from gradwatch.cli.options import INTERRUPTED
from gradwatch.cli.output.console import print_message
from gradwatch.errors import RunError
from gradwatch.history.disk.ranks import part_of
from gradwatch.history.disk.run_summary import summarize
from gradwatch.history.ending import Ending


def is_rank() -> bool:
    """Return whether this process is one of several ranks that a launcher such as torchrun has started."""
    return os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1")


def is_printing_rank() -> bool:
    """Return whether this process prints the messages that all ranks share: it is rank 0 or the only process."""
    return not is_rank() or os.environ.get("RANK", "0") == "0"


def is_failure_shown() -> bool:
    """Return whether this process shows the error that ends it.

    Before the ranks are connected, all of them fail in the same way. Afterwards, `RankError` names the first failure.
    """
    if is_printing_rank():
        return True
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_initialized()


def start(args: Sequence[str], *, ranks: int, directory: Path) -> int:
    """Run `gradwatch` with these arguments on ranks of this machine with torchrun, and return the exit code.

    The exit code is the code of the rank that failed first. Ctrl-C and SIGTERM are passed to every rank.

    Args:
        args: Arguments of `gradwatch`.
        ranks: Number of ranks.
        directory: Run directory of their training.
    """
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from gradwatch.train.recovery import failures

    # torchrun's own default is one thread for each rank, with a warning
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    logging.disable(logging.ERROR)  # the rank has said why it failed, and torchrun would add 30 lines
    try:
        run.run(run.parse_args(["--standalone", "--nproc-per-node", str(ranks), "-m", "gradwatch", *args]))
    except ChildFailedError as error:
        rank, code = _first_failure({rank: int(failure.exitcode) for rank, failure in error.failures.items()})
        if code < 0:
            print_message("error", _killed(directory, rank, signal.Signals(-code)))
            return 128 - code  # as shells do
        return code
    except SignalException:
        return INTERRUPTED
    finally:
        logging.disable(logging.NOTSET)
        failures.discard_if_empty(directory)
    return 0


def _first_failure(codes: Mapping[int, int]) -> tuple[int, int]:
    """Return the rank that failed first and its code, from the codes of all ranks that failed.

    Their times are too coarse: whole seconds. But if a rank is killed, the other ranks lose their connections to it and
    fail, or are ended by SIGTERM, which torchrun sends after the first failure.
    """

    def order(item: tuple[int, int]) -> int:
        _, code = item
        return 2 if code == -signal.SIGTERM else 1 if code > 0 else 0

    return min(codes.items(), key=order)


def _killed(directory: Path, rank: int, by: signal.Signals) -> str:
    """Return which rank of a run was killed at which step, and how to continue the run."""
    from gradwatch.train.recovery import failures

    steps = _steps(directory)
    ending = Ending(kind="killed").sentence(_steps(part_of(directory, rank)))
    why = " (Linux does this when memory runs out)" if by is signal.SIGKILL else ""
    text = f"rank {rank} was {ending} by {by.name}{why}, so the other ranks were stopped"
    return f"{text}; {failures.how_to_continue(directory, steps)}" if steps else text


def _steps(directory: Path) -> int:
    try:
        return summarize(directory).steps
    except RunError:  # it has not begun
        return 0


def end(code: int) -> NoReturn:
    """End this rank at once, after its output is written."""
    for stream in (sys.stdout, sys.stderr):
        if stream:
            stream.flush()
    # if a thread of gloo frees its last tensor while Python shuts down, the process may end with SIGABRT:
    # https://github.com/pytorch/pytorch/pull/179291
    os._exit(code)
