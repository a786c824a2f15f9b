"""What watching costs on a GPU, and that no step waits for it.

    python scripts/benchmarks/gpu.py [--rounds 15] [--only resnet50,gpt] [--modes eager,compile,graph] [--trace DIR]

ResNet-50 at batch 128 and a GPT of 124 M parameters, both in bf16 by autocast, by hand with torch's fused AdamW: bare,
and under `gradwatch.watch` with everything on at its defaults. Each as it is, with `torch.compile`, and with the whole
step captured in a CUDA graph. Rounds are interleaved; shown is the median over rounds of the ratio to the bare loop in
the same round, with the quartiles. The host waits for the device at the end of each stretch alone.

Then a profiler records a few steps under watch, and every call that waits for the device is counted
(cudaStreamSynchronize, cudaDeviceSynchronize, cudaEventSynchronize, and copies that wait). There must be none: else the
names are printed and the exit code is 1. Where there is no GPU, it is 2.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from harness import interleaved, parse, parser, ratio, some, warm_up
from torch import Tensor, nn

import gradwatch
from gradwatch.models import _torchvision, gpt
from gradwatch.records import DataSpec

MODES = ("eager", "compile", "graph")
ARMS = ("bare", "watched")
SETTLING = 12  # steps before a capture or a profile: tables are on the device then, and the graph has been read
PROFILED = 16
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")


@dataclass(frozen=True)
class Workload:
    """A model, and a batch for it."""

    title: str
    stretch: int
    model: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]


WORKLOADS = {
    "resnet50": Workload(
        "ResNet-50, 224 x 224, batch 128, bf16",
        10,
        lambda: _torchvision.build(DataSpec(input_shape=(3, 224, 224), outputs=1000, kind="classes"), name="resnet50"),
        lambda: (torch.randn(128, 3, 224, 224), torch.randint(1000, (128,))),
    ),
    "gpt": Workload(
        "GPT of 124 M parameters, sequence 1,024, batch 8, bf16",
        10,
        lambda: gpt.build(DataSpec(input_shape=(1024,), outputs=50257, kind="tokens"), layers=12, heads=12, width=768),
        lambda: (torch.randint(50257, (8, 1024)), torch.randint(50257, (8, 1024))),
    ),
}


class Step:
    """One training step on the GPU, eager, compiled or captured."""

    def __init__(self, workload: Workload, arm: str, mode: str, stack: contextlib.ExitStack) -> None:
        torch.manual_seed(0)
        self.model = workload.model().train().cuda()
        self.x, self.y = (part.cuda() for part in workload.batch())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True, capturable=mode == "graph")
        self.monitor: gradwatch.Monitor | None = None
        if arm == "watched":
            run = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "run"
            self.monitor = stack.enter_context(gradwatch.watch(self.model, self.optimizer, run=run))
        self.forward = torch.compile(self.model) if mode == "compile" else self.model
        self.graph = self._captured() if mode == "graph" else None

    def __call__(self) -> None:
        """Train one step; return before the device has made it."""
        if self.graph is None:
            self._train()
        else:
            self.graph.replay()
        if self.monitor is not None:
            self.monitor.step(self.loss, batch=self.x)

    def _train(self) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            scores = self.forward(self.x)
        self.loss = nn.functional.cross_entropy(scores.float().flatten(0, -2), self.y.flatten())
        self.optimizer.zero_grad(set_to_none=True)
        self.loss.backward()
        self.optimizer.step()

    def _captured(self) -> torch.cuda.CUDAGraph:
        """Warm up on a stream of its own, as torch wants it, and capture the step."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(SETTLING):
                self._train()
                if self.monitor is not None:
                    self.monitor.step(self.loss, batch=self.x)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._train()
        return graph


def stretch(step: Step, steps: int) -> Callable[[], None]:
    """Return what trains so many steps and waits for the last."""

    def run() -> None:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()

    return run


def waits(step: Step, trace: Path | None) -> Counter[str]:
    """Return which calls that wait for the device a few steps make, and how often."""
    for _ in range(SETTLING):
        step()
    torch.cuda.synchronize()
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profiler:
        for _ in range(PROFILED):
            step()
        names = Counter[str]()
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
    for event in profiler.events() or ():
        names[event.name] += event.name in WAITS
    names["cudaDeviceSynchronize"] -= 1  # the profiler's own, where it ends
    return +names


def arms(workload: Workload, mode: str, stack: contextlib.ExitStack) -> Iterator[tuple[str, Step]]:
    """Yield each arm with its step."""
    for arm in ARMS:
        yield arm, Step(workload, arm, mode, stack)


def main() -> int:
    """Measure, print the table, and say whether a step waited."""
    asked = parser(__doc__, WORKLOADS, rounds=15)
    asked.add_argument("--modes", type=some([*MODES]), default=[*MODES], help="comma-separated")
    asked.add_argument("--trace", type=Path, help="folder for the profiler's traces")
    options = parse(asked)
    if not torch.cuda.is_available():
        print("error: scripts/benchmarks/gpu.py: torch sees no GPU, expected one with CUDA", file=sys.stderr)
        return 2
    warnings.simplefilter("error", RuntimeWarning)  # where a kernel fails, torch operations would be measured
    waited: dict[str, Counter[str]] = {}
    print("| step | bare, ms | **gradwatch** |\n|---|---|---|")
    for name, mode in itertools.product(options.only, options.modes):
        workload = WORKLOADS[name]
        with contextlib.ExitStack() as stack:
            steps = dict(arms(workload, mode, stack))
            stretches = {arm: stretch(step, workload.stretch) for arm, step in steps.items()}
            warm_up(stretches.values(), seconds=5.0)
            seconds = interleaved(stretches, rounds=options.rounds)
            bare_ms = 1e3 * sorted(seconds["bare"])[len(seconds["bare"]) // 2] / workload.stretch
            cells = [
                f"{workload.title}, {mode}",
                f"{bare_ms:.1f}",
                ratio(seconds["watched"], seconds["bare"]),
            ]
            print("| " + " | ".join(cells) + " |", flush=True)
            for arm in ARMS:
                trace = options.trace / f"{name}-{mode}-{arm}.json" if options.trace else None
                waited[f"{name}, {mode}, {arm}"] = waits(steps[arm], trace)
    ill = {place: dict(names) for place, names in waited.items() if names and not place.endswith("bare")}
    print(f"\nCalls that waited for the device, in {PROFILED} steps each: {ill or 'none'}")
    return 1 if ill else 0


if __name__ == "__main__":
    sys.exit(main())
