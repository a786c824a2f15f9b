"""What the monitor's own thread takes from the training beside it: `python scripts/benchmarks/thread.py --only tiny`.

The thread takes rows in a few times a second, for some milliseconds. The steps that ran meanwhile are compared with the
mean of those just before and after: so what else the machine does hits both.
Told is how much longer they were, in units of the processor time that the thread took: 0 where it ran beside them for
nothing, 1 where the training stood still, as it does where Python's lock or a processor is shared.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import some
from workloads import WORKLOADS, loop

import gradwatch
from gradwatch.pipeline.worker import Worker

NEAR = 30
"""Steps before and after that tell how long one takes."""

FIRST = 8
"""Times that are left out: code is compiled, files are made."""

Turns = list[tuple[float, float, float]]


def noting(worker: Worker[Any], turns: Turns) -> Callable[[], None]:
    """Return the work of a thread, which notes when it began and ended, and what processor time it took."""
    drain = worker._drain

    def work() -> None:
        began, used_s = time.perf_counter(), time.thread_time()
        drain()
        turns.append((began, time.perf_counter(), time.thread_time() - used_s))

    return work


def measure(name: str, seconds: float) -> tuple[list[float], Turns]:
    """Return when each step ended, and what the thread did, in a run of so many seconds."""
    of, turns = loop(WORKLOADS[name]), Turns()
    with tempfile.TemporaryDirectory() as folder, gradwatch.watch(of.model, of.optimizer, run=Path(folder)) as monitor:
        worker = monitor.pipeline._worker
        worker._drain = noting(worker, turns)  # type: ignore[method-assign]
        ends = [time.perf_counter()]

        def after(loss: torch.Tensor, batch: torch.Tensor) -> None:
            monitor.step(loss, batch=batch)
            ends.append(time.perf_counter())

        while ends[-1] - ends[0] < seconds:
            of.run(after=after)
    return ends, turns


def lost(ends_T: np.ndarray, turn: tuple[float, float, float]) -> float | None:
    """Return the seconds by which the steps during a turn of the thread were longer; None at the ends of the run."""
    step_s = np.diff(ends_T)
    first, last = np.searchsorted(ends_T, turn[:2]).tolist()
    if first <= NEAR or last + NEAR > len(step_s):
        return None
    during = slice(first - 1, last)
    usual_s = np.mean(np.concatenate([step_s[first - 1 - NEAR : first - 1], step_s[last : last + NEAR]]))
    return float(np.sum(step_s[during] - usual_s))


def main() -> None:
    """Measure and print a line for each workload."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--only", type=some([*WORKLOADS]), default=["tiny", "mlp"], help=f"some of {','.join(WORKLOADS)}"
    )
    parser.add_argument("--seconds", type=float, default=40.0, help="length of a run")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for name in options.only:
        ends, turns = measure(name, options.seconds)
        told = [(turn, seconds) for turn in turns[FIRST:] if (seconds := lost(np.array(ends), turn)) is not None]
        used_s, lost_s = sum(turn[2] for turn, _ in told), sum(seconds for _, seconds in told)
        share, num = used_s / (ends[-1] - ends[0]), len(told)
        print(
            f"{name}: a step takes {1e6 * float(np.median(np.diff(ends))):,.0f} us; in {num} turns the thread used "
            f"{1e3 * used_s / num:.1f} ms each, {100 * share:.1f} % of the time, and the training lost "
            f"{lost_s / used_s:.2f} of that; {options.threads} thread of torch, {os.cpu_count()} processors",
            flush=True,
        )


if __name__ == "__main__":
    main()
