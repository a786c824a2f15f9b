"""What it costs to be able to run a step again: time ratio and memory of `watch.record` at its defaults.

    python scripts/benchmarks/record.py [--rounds 40] [--only tiny,quickstart,resnet18,gpt] [--threads 1]

Both arms are gradwatch's own loop with everything else on; one keeps a recent state, the other does not. Each round
trains a stretch of steps of both, in an order that changes, long enough for at least one snapshot at the default
interval and rest. Shown is the median ratio of the same round with its quartiles, and the memory of a snapshot. Below
the table: what the way that was not taken would cost, the states of all random generators before every step.
"""

from __future__ import annotations

import contextlib
import tempfile
import timeit
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from harness import Seconds, interleaved, parse, parser, ratio, timed
from loop import CONFIGS, Workload, config_of, stretch_of

from gradwatch.state.rng import random_state
from gradwatch.state.snapshot import num_bytes
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


def measure(workload: Workload, rounds: int) -> tuple[Seconds, float, int]:
    """Return the seconds of each arm's stretches, the milliseconds of a step, and the bytes of a snapshot."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        kept, bare = (
            stack.enter_context(training(workload, recorded=recorded, out=Path(folder))) for recorded in (True, False)
        )
        for session in (kept, bare):
            stretch_of(session, workload.stretch)
        every = kept.config.watch.record.every
        step_s = min(timed(partial(stretch_of, bare, workload.stretch)) for _ in range(3)) / workload.stretch
        steps = -(-max(every, int(STRETCH_S / step_s)) // every) * every
        arms = {name: partial(stretch_of, of, steps) for name, of in (("kept", kept), ("bare", bare))}
        seconds = interleaved(arms, rounds=rounds)
        assert kept.recorder, "it is on by default"
        return seconds, 1e3 * step_s, num_bytes(kept.recorder.read())


def main() -> None:
    """Measure and print the table."""
    options = parse(parser(__doc__, CONFIGS, rounds=40))
    print("| step | ms | with record / without | memory, MB |")
    print("|---|---|---|---|")
    for name in options.only:
        seconds, step_ms, num_bytes = measure(CONFIGS[name], options.rounds)
        cells = f"{ratio(seconds['kept'], seconds['bare'])} | {num_bytes / 2**20:.1f}"
        print(f"| {CONFIGS[name].title} | {step_ms:.2f} | {cells} |", flush=True)
    each_us = 1e6 * min(timeit.repeat(random_state, number=1000, repeat=5)) / 1000
    print(f"\nthe states of all random generators before every step: {each_us:.0f} us a step")


if __name__ == "__main__":
    main()
