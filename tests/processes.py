"""Run a function on several ranks, in processes that are forked from one that has imported torch.

An import of torch and gradwatch takes 7 s of CPU, which each of the ranks would need.
"""

import contextlib
import faulthandler
import gc
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import warm_python


@dataclass(frozen=True)
class Ended:
    """What a process has left.

    Args:
        said: What its function has returned; None if it was killed.
        output: What it has printed and written to stderr.
    """

    said: Any
    output: str


def run_ranks(
    function: Callable[..., Any],
    *args: Any,
    ranks: int,
    killed: Sequence[int] = (),
    prepare: Callable[[], object] | None = None,
    timeout_s: float = 280,
) -> list[Ended]:
    """Call `function(rank, *args)` in one process for each rank, and return what each has left.

    If a rank fails, the others are killed, since they may wait for it.

    Args:
        function: A function of a module of this folder, which returns what can be pickled.
        *args: Its further arguments, which can be pickled, too.
        ranks: Number of ranks.
        killed: Ranks that are expected to be killed. All others must end without an error.
        prepare: Called before the ranks are forked, to import and to read what all of them need. It runs no backward
            pass, whose threads a fork would lose.
        timeout_s: Seconds after which all ranks are killed.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "call.pickle").write_bytes(pickle.dumps((function, args, ranks, prepare)))
        with subprocess.Popen([*warm_python.command(), __file__, name]) as leader:
            with contextlib.suppress(subprocess.TimeoutExpired):
                leader.wait(timeout_s)
            leader.terminate()
        ended = [_ended(folder, rank) for rank in range(ranks)]
        codes = (folder / "codes.json").read_text() if leader.returncode == 0 else f"leader: {leader.returncode}"
    expected = {rank: -signal.SIGKILL if rank in killed else 0 for rank in range(ranks)}
    assert codes == json.dumps(expected), "\n".join([codes, *(each.output for each in ended)])
    return ended


def _ended(folder: Path, rank: int) -> Ended:
    said, output = folder / f"{rank}.pickle", folder / f"{rank}.txt"
    return Ended(
        said=pickle.loads(said.read_bytes()) if said.exists() else None,
        output=output.read_text() if output.exists() else "",
    )


def _lead(folder: Path) -> None:
    """Fork the ranks, and write their exit codes."""
    function, args, ranks, prepare = pickle.loads((folder / "call.pickle").read_bytes())
    if prepare:
        prepare()
    gc.freeze()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("the ranks took too long"))
    alive, codes = {}, {}
    try:
        for rank in range(ranks):
            if not (child := os.fork()):
                _run(function, (rank, *args), folder)
            alive[child] = rank
        while alive and max(codes.values(), default=0) <= 0:
            child, status = os.wait()
            codes[alive.pop(child)] = os.waitstatus_to_exitcode(status)
    finally:
        for child in alive:
            os.kill(child, signal.SIGKILL)
    (folder / "codes.json").write_text(json.dumps(dict(sorted(codes.items()))))


def _run(function: Callable[..., Any], args: tuple[Any, ...], folder: Path) -> None:
    import torch

    rank, code = args[0], 1
    output = os.open(folder / f"{rank}.txt", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(output, stream)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    faulthandler.enable()
    torch.set_num_threads(1)
    try:
        (folder / f"{rank}.pickle").write_bytes(pickle.dumps(function(*args)))
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    # if a thread of gloo frees its last tensor while Python shuts down, the process may end with SIGABRT:
    # https://github.com/pytorch/pytorch/pull/179291
    os._exit(code)


if __name__ == "__main__":
    _lead(Path(sys.argv[1]))
