"""What watching costs in a loop of one's own, beside what others charge for less.

    python scripts/benchmarks/watch.py [--rounds 16] [--only mlp] [--arms stock] [--optimizer sgd] [--threads 2]

The bare loop is written by hand, with torch's fused AdamW unless another optimizer is named. `stock` is the same loop
under `gradwatch.watch` with everything on at its defaults: all statistics at every step, detectors, history on disk,
TensorBoard. The others are what their documentation has one write, at every step unless said; those of packages that
are not installed (wandb, lightning, composer, cockpit) are left out, and so is one that does not take a model, with its
reason.

Each round runs a stretch of steps of every arm, in an order that is drawn anew, so that what else the machine does, and
what the arm before left in the caches, hits all arms alike. A stretch is long enough for a turn or two of the monitor's
thread beside the training, as in a run, and ends when that has taken everything in. Where a step takes a tenth of a
second and more, and no peer is measured, arms take turns after each step of a stretch. A monitor's thread works only
while the loop that it watches has its turn, and the turn waits for it to end; what goes by the clock, taking rows in
and looking at the memory, comes as many times more seldom as there are arms, so after as many steps as in a run. To the
budget, steps seem as long as those of all arms: it thins less than in a run.

Two loops with the same code differ by up to 3 % for as long as their process lives, as their memory happens to lie; so
all loops of a process train the same weights by the same optimizer state, and each workload is measured in several
processes, each of which makes its loops in an order of its own. In each there are two bare ones. Shown is the median
over rounds of the ratio to the mean of both in the same round, the quartiles, and the standard error of that median, as
of a normal distribution with these quartiles. `again`, the second of them in units of the first, tells what of a ratio
is noise.

What the first steps of a run take once is over before the rounds begin: modules are imported, memory is taken, and the
budget has not ruled yet. `--arms begun --rounds 1 --steps 256` measures it, with a warm loop and a new monitor.

`--arms read,read-in-backward` measures the reading of gradients alone: of all before the update, on all threads, or of
each by a hook when it has just been written, on the thread of the backward pass.

`--clock cpu` counts the processor time of all threads, as if none of them ran beside another: an upper bound, which a
machine that is busy with something else still tells.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import multiprocessing
import random
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

from harness import CLOCKS, Seconds, clock, parse, parser, prepare, ratio, some
from peers import NEEDS, PEERS, Arm, MakeArm
from torch import Tensor
from workloads import OPTIMIZERS, WORKLOADS, Loop, Workload, loop, shared

import gradwatch
from gradwatch.monitor import host_stats
from gradwatch.pipeline import worker
from gradwatch.probe.gradients.statistics import GradientProbe

WARM_UP = 24
"""Steps that each arm makes unmeasured, in whole stretches: code is compiled, memory taken, files are made."""


def bare(workload: Workload, stack: contextlib.ExitStack) -> Arm:
    """Nothing is watched."""
    return loop(workload).run


def read(workload: Workload, stack: contextlib.ExitStack) -> Arm:
    """Nothing is watched, but all statistics of the gradients are read before the update."""
    of = loop(workload)
    probe = GradientProbe(list(of.model.parameters()), kernel="native")

    def before_update() -> None:
        probe.read()

    return lambda: of.run(before_update)


def read_in_backward(workload: Workload, stack: contextlib.ExitStack) -> Arm:
    """Nothing is watched, but the statistics of each gradient are read when it has just been written."""
    of = loop(workload)
    params = [p for p in of.model.parameters() if p.requires_grad]
    probes: dict[Tensor, GradientProbe] = {p: GradientProbe([p], kernel="native") for p in params}

    def hook(param: Tensor) -> None:
        probes[param].read()

    for p in params:
        p.register_post_accumulate_grad_hook(hook)
    return of.run


def stock(workload: Workload, stack: contextlib.ExitStack) -> Arm:
    """Watched by gradwatch."""
    return under_watch(loop(workload), stack, is_turn=workload.turn is not None)


def begun(workload: Workload, stack: contextlib.ExitStack) -> Arm:
    """As `stock`, from the first watched step on."""
    of = loop(workload)
    for _ in range(-(-WARM_UP // workload.stretch)):  # the loop is warm before it is watched
        of.run()
    return under_watch(of, stack, is_turn=workload.turn is not None)


def under_watch(of: Loop, stack: contextlib.ExitStack, *, is_turn: bool) -> Arm:
    """Return a loop with everything on, for whole stretches or for turns of one."""
    run = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "run"
    monitor = stack.enter_context(gradwatch.watch(of.model, of.optimizer, run=run))

    def stretch() -> None:
        of.run(after=monitor.step)
        monitor.findings()  # waits until all rows are taken in, which would else fall into the stretch of another arm

    def turn() -> None:
        working.release()
        of.run(after=monitor.step)
        working.acquire()

    if not is_turn:
        return stretch
    working = monitor.pipeline._worker._processing
    working.acquire()
    stack.callback(working.release)
    return turn


BARE = ("bare", "again")
"""The arms that all others are compared to."""

ARMS: dict[str, tuple[str, MakeArm]] = {
    "bare": ("by hand", bare),
    "again": ("one such loop by another", bare),
    "stock": ("**gradwatch**", stock),
    "begun": ("**gradwatch**, from its first step", begun),
    "read": ("the statistics alone, before the update", read),
    "read-in-backward": ("the statistics alone, in the backward pass", read_in_backward),
} | PEERS


def measure(name: str, names: list[str], options: argparse.Namespace, process: int) -> Seconds:
    """Return the seconds of each arm's stretches, round by round; in a new process, which knows no options yet."""
    prepare(options)
    workload = resized(shared(replace(WORKLOADS[name], optimizer=options.optimizer)), options.steps)
    if PEERS.keys() & set(names):  # some begin anew and flush at each call
        workload = replace(workload, turn=None)
    turn = replace(workload, stretch=workload.turn or workload.stretch)
    num_turns, unmeasured = workload.stretch // turn.stretch, -(-WARM_UP // workload.stretch)
    if workload.turn:
        worker.BATCH_S *= len(names)
        host_stats.MEMORY_INTERVAL_S *= len(names)
    with contextlib.ExitStack() as stack:
        made = {name: ARMS[name][1](turn, stack) for name in random.Random(process).sample(names, len(names))}
        turns = unmeasured * num_turns
        arms = {name: arm for name, arm in made.items() if name == "begun" or is_warm(name, arm, turns=turns)}
        gc.freeze()  # else what imports have left is gone through now and then, 0.2 s of whatever arm has its turn
        stack.callback(gc.unfreeze)
        seconds: Seconds = {name: [] for name in arms}
        for i in range(options.rounds):
            order, spent = random.Random(f"{process} {i}"), dict.fromkeys(arms, 0.0)
            for _ in range(num_turns):
                for name in order.sample([*arms], len(arms)):  # each leaves its traces in the caches
                    began = clock()
                    told = arms[name]()
                    spent[name] += clock() - began if told is None else told
            for name, taken in spent.items():
                seconds[name].append(taken)
    return seconds


def is_warm(name: str, arm: Arm, *, turns: int) -> bool:
    """Run an arm for a while; say whether it takes the model at all."""
    try:
        for _ in range(turns):
            arm()
    except Exception as error:
        if name in NEEDS:
            print(f"{name} is left out: {type(error).__name__}: {error}"[:300], flush=True)
            return False
        raise
    return True


def resized(workload: Workload, steps: int | None) -> Workload:
    """Return a workload with so many steps in a stretch; its own number for None."""
    return replace(workload, stretch=steps or workload.stretch)


def column(name: str, arms: list[str], options: argparse.Namespace) -> tuple[str, dict[str, str]]:
    """Measure a workload, print each arm's lines, and return the heading of its column and its cells."""
    seconds: Seconds = {}
    for i in range(options.processes):
        with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as process:
            for arm, times in process.submit(measure, name, arms, options, i).result().items():
                seconds.setdefault(arm, []).extend(times)
    workload = resized(WORKLOADS[name], options.steps)
    first, again = (seconds[arm] for arm in BARE)
    both = [(a + b) / 2 for a, b in zip(first, again, strict=True)]
    cells = {"again": ratio(again, first, has_error=True)}
    cells |= {arm: ratio(seconds[arm], both, has_error=True) for arm in arms[len(BARE) :] if arm in seconds}
    for arm, text in cells.items():
        print(f"{name} {arm}: {text} in {len(seconds[arm])} rounds", flush=True)
    step_ms = 1e3 * statistics.median(both) / workload.stretch
    return f"{workload.title}, {step_ms:.3g} ms", cells


def main() -> None:
    """Measure and print the table."""
    asked = parser(__doc__, WORKLOADS, rounds=16)
    asked.add_argument("--processes", type=int, default=5, help="processes that go through all rounds, in turn")
    usual = [*BARE, "stock", *PEERS]
    asked.add_argument("--arms", type=some([*ARMS]), default=usual, help="arms, comma-separated")
    asked.add_argument("--optimizer", choices=[*OPTIMIZERS], default="fused", help="fused, foreach and adamw are AdamW")
    asked.add_argument("--steps", type=int, help="steps of a stretch; fewer for what is slow")
    asked.add_argument("--clock", choices=CLOCKS, default="wall")
    options = parse(asked)
    arms = [n for n in options.arms if importlib.util.find_spec(NEEDS.get(n, "torch"))]
    arms = [*BARE, *(n for n in arms if n not in BARE)]
    columns = dict(column(name, arms, options) for name in options.only)
    print("| | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    print(f"| {ARMS['bare'][0]} | " + " | ".join("1" for _ in columns) + " |")
    for arm in arms[1:]:
        print(f"| {ARMS[arm][0]} | " + " | ".join(cells.get(arm, "") for cells in columns.values()) + " |")


if __name__ == "__main__":
    main()
