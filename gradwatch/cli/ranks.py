"""Start the ranks of a training by torchrun, and let only one of them print."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from gradwatch.cli.options import INTERRUPTED
from gradwatch.cli.output.console import print_message


def is_rank() -> bool:
    """Return whether this process is one of several ranks that a launcher such as torchrun has started."""
    return os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1")


def is_printing_rank() -> bool:
    """Return whether this process prints what all ranks have in common: rank 0, or the only process."""
    return not is_rank() or os.environ.get("RANK", "0") == "0"


def is_failure_shown() -> bool:
    """Return whether this process shows the error that ends it.

    Before the ranks are connected, all of them make the same mistake. Afterwards, `RankError` tells which was first.
    """
    if is_printing_rank():
        return True
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_initialized()


def start(args: Sequence[str], *, ranks: int) -> int:
    """Run `gradwatch` with these arguments on ranks of this machine by torchrun, and return the exit code.

    The exit code is the code of the rank that failed first. Ctrl-C and SIGTERM are passed to every rank.
    """
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # torchrun's own default is one thread for each rank, with a warning
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    logging.disable(logging.ERROR)  # the rank has said why it failed, and torchrun would add 30 lines
    try:
        run.run(run.parse_args(["--standalone", "--nproc-per-node", str(ranks), "-m", "gradwatch", *args]))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            print_message("error", f"rank {rank} was killed by {failure.signal_name()}, so the others were ended, too")
            return 128 - failure.exitcode  # as shells do
        return int(failure.exitcode)
    except SignalException:
        return INTERRUPTED
    finally:
        logging.disable(logging.NOTSET)
    return 0


def end(code: int) -> NoReturn:
    """End this rank at once, after its output is written."""
    for stream in (sys.stdout, sys.stderr):
        if stream:
            stream.flush()
    # gloo's threads may let go of their last tensor while Python shuts down, which ends it with SIGABRT now and then:
    # https://github.com/pytorch/pytorch/pull/179291
    os._exit(code)
