"""Time a sink at a step with nothing due, and at a redraw: `python scripts/benchmarks/sinks.py`."""

from __future__ import annotations

import functools
import io
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.render import Sink
from gradwatch.render.common.layers import matrices
from gradwatch.render.common.sparkline import UNICODE
from gradwatch.render.tensorboard.sink import TensorBoard
from gradwatch.render.terminal.live_view import panel
from gradwatch.render.terminal.sink import Terminal

CALLS, ROUNDS = 100_000, 7


def per_call(call: Callable[[], object], calls: int) -> float:
    """Return the median over the rounds of the seconds that a call takes."""
    rounds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for _ in range(calls):
            call()
        rounds.append((time.perf_counter() - began) / calls)
    return statistics.median(rounds)


def console() -> Console:
    """Return a terminal that nobody sees."""
    return Console(file=io.StringIO(), force_terminal=True, color_system="truecolor", width=100)


def main() -> None:
    """Print microseconds of an idle step for each sink, and milliseconds of a redraw by the number of layers."""
    history = Synthetic(layers=24, steps=300).history()
    with tempfile.TemporaryDirectory() as folder:
        training = Terminal(console=console(), log_format="rich")
        sinks: dict[str, Sink] = {
            "live view": training,
            "plain lines": Terminal(console=console(), log_format="plain"),
            "lines of JSON": Terminal(console=console(), log_format="json"),
            "TensorBoard": TensorBoard(directory=Path(folder)),
        }
        told = []
        for name, sink in sinks.items():
            sink.write(history)  # what is due is shown; what follows has the same step
            training._due_s = float("inf")
            idle_s = per_call(functools.partial(sink.write, history), CALLS)
            sink.close(history, ())
            told.append(f"{name:<14} {1e6 * idle_s:.2f} us on a step where nothing is due")
    print("\n".join(told))
    for num_layers in (4, 24, 200):
        history = Synthetic(layers=num_layers, steps=300).history()
        of = matrices(history.info.layers)
        drawn_s = per_call(functools.partial(panel, history, of, width=100, signs=UNICODE), 20)
        print(f"a redraw of {num_layers:>3} layers takes {1e3 * drawn_s:.1f} ms, at most 4 times a second")


if __name__ == "__main__":
    main()
