"""What the benchmarks share: the options they take, warming up, timing, and the ratio of one arm to another."""

from __future__ import annotations

import argparse
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

Seconds = dict[str, list[float]]
"""Of each arm the seconds of its stretches, round by round."""


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
chosen = "wall"


def clock() -> float:
    """Return the seconds of the clock that was chosen: those of the wall, or of the processor on all threads."""
    return CLOCKS[chosen]()


def parser(doc: str | None, names: Iterable[str], *, rounds: int) -> argparse.ArgumentParser:
    """Return the options of a benchmark: how many rounds, of which workloads, on how many threads."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--rounds", type=int, default=rounds)
    known = tuple(names)
    made.add_argument(
        "--only", type=some(known), default=known, help=f"workloads, of {','.join(known)}; comma-separated"
    )
    made.add_argument("--threads", type=int, default=1)
    return made


def some(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Return what reads a list of names, all of which must be known."""

    def read(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"got {', '.join(unknown)}, expected some of {','.join(known)}")
        return names

    return read


def parse(of: argparse.ArgumentParser) -> argparse.Namespace:
    """Return the options that were given, and make this process ready for them."""
    options = of.parse_args()
    prepare(options)
    return options


def prepare(options: argparse.Namespace) -> None:
    """Set threads, warnings and, where there is a choice, the clock of this process to the options."""
    global chosen
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    chosen = getattr(options, "clock", chosen)


def timed(call: Callable[[], object]) -> float:
    """Return how long a call takes, in seconds."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def warm_up(arms: Iterable[Callable[[], object]], *, seconds: float) -> None:
    """Run every arm for so long, one after the other."""
    for arm in arms:
        began = time.perf_counter()
        while time.perf_counter() - began < seconds:
            arm()


def interleaved(arms: Mapping[str, Callable[[], object]], *, rounds: int) -> Seconds:
    """Time all arms in every round, beginning with another one each time: what else the machine does hits all alike."""
    seconds: Seconds = {name: [] for name in arms}
    names = list(arms)
    for i in range(rounds):
        turn = i % len(names)
        for name in names[turn:] + names[:turn]:
            seconds[name].append(timed(arms[name]))
    return seconds


def ratio(seconds: Iterable[float], of: Iterable[float], *, has_error: bool = False) -> str:
    """Return the median over the rounds of the ratio to another arm, and its quartiles.

    Args:
        seconds: Seconds of an arm, round by round.
        of: Those of the other.
        has_error: Whether to tell the median's standard error, too: that of a normal distribution with these quartiles.
    """
    ratios = [a / b for a, b in zip(seconds, of, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    digits = 3 if middle < 2 else 1
    text = f"{middle:.{digits}f} [{low:.{digits}f}-{high:.{digits}f}]"
    if not has_error:
        return text
    deviation = (high - low) / (2 * statistics.NormalDist().inv_cdf(0.75))
    return f"{text} ±{math.sqrt(math.pi / 2 / len(ratios)) * deviation:.{digits}f}"
