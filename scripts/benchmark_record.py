"""What it costs to be able to run a step again: time ratio and memory of `watch.record` at its defaults.

    python scripts/benchmark_record.py [--rounds 40] [--only tiny,quickstart,resnet18,gpt] [--threads 1]

Both arms are gradwatch's own loop with everything else on; one keeps a recent state, the other does not. Each round
trains a stretch of steps of both, in an order that changes, long enough for at least one snapshot at the default
interval and rest. Shown is the median ratio of the same round with its quartiles, and the memory of a snapshot. Below
the table: what the way that was not taken would cost, the states of all random generators before every step.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
import timeit
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from benchmark_loop import CONFIGS, AfterSteps, Workload, config_of

from gradwatch.state.randomness import random_state
from gradwatch.train.loop import run
from gradwatch.train.session import Session

STRETCH_S = 2.0
"""Least time of a stretch: beyond the rest between two snapshots of short steps."""


@contextlib.contextmanager
def training(workload: Workload, *, recorded: bool, out: Path) -> Iterator[Session]:
    """Yield a session with everything on, and with or without the recorder."""
    config = config_of(workload, watched=True, out=out)
    record = config.watch.record.model_copy(update={"enabled": recorded})
    watch = config.watch.model_copy(update={"record": record})
    directory = out / f"run-{recorded}"
    directory.mkdir()
    with contextlib.ExitStack() as stack:
        torch.manual_seed(0)
        changed = config.model_copy(update={"watch": watch})
        yield Session(changed, directory, resume=False, log_format="plain", stack=stack)


def timed(session: Session, steps: int) -> float:
    """Return how long so many steps of a session take, in seconds."""
    began = time.perf_counter()
    run(session, AfterSteps(session, steps))
    return time.perf_counter() - began


def measure(workload: Workload, rounds: int) -> tuple[list[float], float, int]:
    """Return the ratios of the rounds, the milliseconds of a step, and the bytes of a snapshot."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        arms = [
            stack.enter_context(training(workload, recorded=recorded, out=Path(folder))) for recorded in (True, False)
        ]
        for session in arms:
            timed(session, workload.stretch)
        every = arms[0].config.watch.record.every
        step_s = min(timed(arms[1], workload.stretch) for _ in range(3)) / workload.stretch
        steps = -(-max(every, int(STRETCH_S / step_s)) // every) * every
        ratios = []
        for i in range(rounds):
            order = arms if i % 2 else arms[::-1]
            seconds = {session: timed(session, steps) for session in order}
            ratios.append(seconds[arms[0]] / seconds[arms[1]])
        assert arms[0].recorder, "it is on by default"
        return ratios, 1e3 * step_s, arms[0].recorder.num_bytes


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--only", default=",".join(CONFIGS), help="workloads, comma-separated")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    print("| step | ms | with record / without | memory, MB |")
    print("|---|---|---|---|")
    for name in options.only.split(","):
        ratios, step_ms, num_bytes = measure(CONFIGS[name], options.rounds)
        low, middle, high = statistics.quantiles(ratios, n=4)
        cells = f"{middle:.3f} [{low:.3f}-{high:.3f}] | {num_bytes / 2**20:.1f}"
        print(f"| {CONFIGS[name].title} | {step_ms:.2f} | {cells} |", flush=True)
    each_us = 1e6 * min(timeit.repeat(random_state, number=1000, repeat=5)) / 1000
    print(f"\nthe states of all random generators before every step: {each_us:.0f} us a step")


if __name__ == "__main__":
    main()
