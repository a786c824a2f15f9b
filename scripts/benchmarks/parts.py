"""What watching adds to the parts of a step, where a ratio of whole steps is lost in the noise of the machine.

    python scripts/benchmarks/parts.py [--rounds 100] [--only resnet18,gpt] [--threads 1]

The loops of `benchmarks/watch.py` take turns step by step, on the same weights and state. Watching adds to the call
of the optimizer's `step()`, whose hooks read the gradients; the call of `Monitor.step` after it; and, at sampled steps,
the forward pass, where hooks read activations. Each is timed by itself, behind the rest of a real step, so that caches
are as cold as in a training. Means leave out the largest and the least tenth; plain and sampled steps are taken apart,
and put together as often as they came, which is as scheduled, more often than in a run that keeps to its budget.

The monitor's thread works beside the training, where a processor is free. So the last two columns say what a whole step
comes to, in units of a bare one, without its processor time and with all of it.
"""

from __future__ import annotations

import contextlib
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness import parse, parser
from torch import nn
from workloads import WORKLOADS, Loop, Workload, loop, shared

import gradwatch
from gradwatch import Monitor
from gradwatch.monitor import host_stats
from gradwatch.pipeline import worker

WARM_UP = 24
"""Steps of each loop that are left out."""

NUM_LOOPS = 2

Parts = tuple[float, float, float, float]
"""Seconds of a step: of all of it, of the optimizer's call, of the monitor's, of hooks in the forward pass."""


@dataclass
class Turns:
    """A loop that makes one step at each call, and notes what its parts took; watched where it has a monitor."""

    of: Loop
    monitor: Monitor | None = None
    plain: list[Parts] = field(default_factory=list)
    sampled: list[Parts] = field(default_factory=list)

    def __call__(self) -> None:
        clock, monitor = time.perf_counter, self.monitor
        is_sampled = monitor is not None and monitor._collector.is_due
        x, y = next(self.of.batches)
        with working(monitor):
            began = clock()
            loss = nn.functional.cross_entropy(self.of.model(x).flatten(0, -2), y.flatten())
            self.of.optimizer.zero_grad()
            loss.backward()
            updating = clock()
            self.of.optimizer.step()
            updated = clock()
            hooks_s = monitor._collector._activations.spent_s if monitor and is_sampled else 0.0  # type: ignore[union-attr]
            recording = clock()
            if monitor:
                monitor.step(loss, batch=x)
            ended = clock()
        rows = self.sampled if is_sampled else self.plain
        rows.append((ended - began, updated - updating, ended - recording, hooks_s))

    def part(self, place: int) -> float:
        """Return the mean of a part over all steps, in milliseconds."""
        rows = (self.plain, self.sampled)
        total = sum(len(of) * trimmed([parts[place] for parts in of]) for of in rows if of)
        return 1e3 * total / sum(map(len, rows))


@contextlib.contextmanager
def working(monitor: Monitor | None) -> Iterator[None]:
    """Let a monitor's thread work while the loop that it watches has its turn, and only then."""
    if monitor is None:
        yield
        return
    lock = monitor.pipeline._worker._processing
    lock.release()
    yield
    lock.acquire()


def trimmed(values: list[float]) -> float:
    """Return the mean without the largest and the least tenth."""
    cut = len(values) // 10
    kept = sorted(values)[cut : len(values) - cut]
    return sum(kept) / len(kept)


def measure(workload: Workload, rounds: int, stack: contextlib.ExitStack) -> dict[str, Turns]:
    """Return the loops after so many steps of each: `bare` and `watched`."""
    one = replace(shared(workload), stretch=1)
    loops = {name: Turns(loop(one)) for name in ("bare", "watched")}
    of, run = loops["watched"].of, Path(stack.enter_context(tempfile.TemporaryDirectory())) / "run"
    loops["watched"].monitor = monitor = stack.enter_context(gradwatch.watch(of.model, of.optimizer, run=run))
    lock = monitor.pipeline._worker._processing
    lock.acquire()
    stack.callback(lock.release)
    order = random.Random(0)
    for i in range(WARM_UP + rounds):
        for turns in order.sample([*loops.values()], len(loops)):
            turns()
            if i < WARM_UP:
                turns.plain.clear()
                turns.sampled.clear()
    return loops


def main() -> None:
    """Measure and print the table."""
    options = parse(parser(__doc__, WORKLOADS, rounds=100))
    print("| | step(), ms | with hooks | Monitor.step | forward hooks | thread | step | and thread |")
    print("|---" * 8 + "|")
    worker.BATCH_S *= NUM_LOOPS  # clock-driven work then comes after as many steps of a loop as in a run
    host_stats.MEMORY_INTERVAL_S *= NUM_LOOPS
    for name in options.only:
        with contextlib.ExitStack() as stack:
            loops = measure(WORKLOADS[name], options.rounds, stack)
            whole, update = loops["bare"].part(0), loops["bare"].part(1)
            monitor = loops["watched"].monitor
            assert monitor is not None, "it is watched"
            thread = 1e3 * monitor.pipeline.cpu_s / monitor.next_step
            parts = [loops["watched"].part(place) for place in (1, 2, 3)]
            ratio = 1 + (sum(parts) - update) / whole
            cells = [f"{update:.3f}", *(f"{part:.3f}" for part in parts), f"{thread:.3f}"]
            cells += [f"{ratio:.4f}", f"{ratio + thread / whole:.4f}"]
            print(f"| {WORKLOADS[name].title} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
