"""What watching costs on a GPU, and that no step waits for it.

    python scripts/benchmarks/gpu.py [--rounds 15] [--only resnet50,gpt] [--modes eager,compile,graph]
        [--arms bare,again,watched,naive,lightning,wandb] [--seconds 5] [--trace DIR]

ResNet-50 at batch 128 and a GPT of 124 M parameters, both in bf16 by autocast, by hand with torch's fused AdamW: bare,
a second such loop, under `gradwatch.watch` with everything on at its defaults, and with what other tools measure. Each
as it is, with `torch.compile`, and with the whole step captured in a CUDA graph. Rounds are interleaved; shown is the
median over rounds of the ratio to the bare loop in the same round, with the quartiles. The host waits for the device at
the end of each stretch alone. Other tools are measured without compilation and graphs: they wait for the device, which
a graph does not allow.

Then a profiler records a few steps of the bare and the watched loop. The device time of each kernel that the bare loop
lacks is shown, and every call that waits for the device is counted (cudaStreamSynchronize, cudaDeviceSynchronize,
cudaEventSynchronize, and copies that wait). There must be none: else the names are printed and the exit code is 1.
Where there is no GPU, it is 2.
"""

from __future__ import annotations

import contextlib
import itertools
import os
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
SETTLING = 32  # steps before a capture or a profile: what is read in the first steps only has been read, and may wait
PROFILED = 20  # two periods of the sampled statistics
SHOWN = 12  # kernels
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")

Read = Callable[[], None]
"""What a tool does between the backward pass and the update."""


@dataclass(frozen=True)
class Workload:
    """A model, and batches for it: as many as a loop repeats before one comes again.

    The steps of a stretch are no multiple of those between two samples. A stretch begins with an idle device, where a
    longer step of the host shows, and no sample should always be there.
    """

    title: str
    stretch: int
    model: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    batches: int


WORKLOADS = {
    "resnet50": Workload(
        "ResNet-50, 224 x 224, batch 128, bf16",
        25,
        lambda: _torchvision.build(DataSpec(input_shape=(3, 224, 224), outputs=1000, kind="classes"), name="resnet50"),
        lambda: (torch.randn(128, 3, 224, 224), torch.randint(1000, (128,))),
        16,
    ),
    "gpt": Workload(
        "GPT of 124 M parameters, sequence 1,024, batch 8, bf16",
        25,
        lambda: gpt.build(DataSpec(input_shape=(1024,), outputs=50257, kind="tokens"), layers=12, heads=12, width=768),
        lambda: (torch.randint(50257, (8, 1024)), torch.randint(50257, (8, 1024))),
        256,
    ),
}


def naive(model: nn.Module, stack: contextlib.ExitStack) -> Read:
    """Read one norm per parameter, `.item()` each."""
    params = list(model.parameters())

    def read() -> None:
        for p in params:
            assert p.grad is not None, "every parameter of these models has one"
            p.grad.norm().item()

    return read


def lightning(model: nn.Module, stack: contextlib.ExitStack) -> Read:
    """Compute the norms that Lightning's documentation logs at every step, and read them."""
    from lightning.pytorch.utilities import grad_norm

    def read() -> None:
        for norm in grad_norm(model, norm_type=2).values():
            float(norm)

    return read


def wandb(model: nn.Module, stack: contextlib.ExitStack) -> Read:
    """Let wandb.watch send a histogram of each gradient at every step."""
    import wandb

    os.environ["WANDB_SILENT"] = "true"
    run = wandb.init(mode="offline", dir=stack.enter_context(tempfile.TemporaryDirectory()), reinit="return_previous")
    stack.callback(run.finish)
    run.watch(model, log="gradients", log_freq=1)
    return lambda: run.log({})


PEERS: dict[str, Callable[[nn.Module, contextlib.ExitStack], Read]] = {
    "naive": naive,
    "lightning": lightning,
    "wandb": wandb,
}
ARMS = ("bare", "again", "watched", *PEERS)


class Step:
    """One training step on the GPU, eager, compiled or captured."""

    def __init__(self, workload: Workload, arm: str, mode: str, stack: contextlib.ExitStack) -> None:
        torch.manual_seed(0)
        with torch.device("cuda"):
            self.model = workload.model().train()
            batches = [workload.batch() for _ in range(workload.batches)]
            self.x, self.y = workload.batch()
        self.batches = itertools.cycle(batches)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True, capturable=mode == "graph")
        self.monitor: gradwatch.Monitor | None = None
        if arm == "watched":
            run = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "run"
            self.monitor = stack.enter_context(gradwatch.watch(self.model, self.optimizer, run=run, on_finding=None))
        self.read = PEERS[arm](self.model, stack) if arm in PEERS else None
        self.forward = torch.compile(self.model) if mode == "compile" else self.model
        self.graph = self._captured() if mode == "graph" else None

    def __call__(self) -> None:
        """Train one step; return before the device has made it."""
        x, y = next(self.batches)
        if self.graph is None:
            self._train(x, y)
        else:
            self.x.copy_(x)
            self.y.copy_(y)
            self.graph.replay()
        if self.monitor is not None:
            self.monitor.step(self.loss, batch=x)

    def _train(self, x: Tensor, y: Tensor) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            scores = self.forward(x)
        self.loss = nn.functional.cross_entropy(scores.float().flatten(0, -2), y.flatten())
        self.optimizer.zero_grad(set_to_none=True)
        self.loss.backward()
        if self.read is not None:
            self.read()
        self.optimizer.step()

    def _captured(self) -> torch.cuda.CUDAGraph:
        """Warm up on a stream of its own, as torch wants it, and capture the step."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(SETTLING):
                self._train(self.x, self.y)
                if self.monitor is not None:
                    self.monitor.step(self.loss, batch=self.x)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._train(self.x, self.y)
        return graph


def stretch(step: Step, steps: int) -> Callable[[], None]:
    """Return what trains so many steps and waits for the last."""

    def run() -> None:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()

    return run


@dataclass(frozen=True)
class Profile:
    """What a profiler saw in some steps: calls that wait by name, and milliseconds of the device a step by kernel."""

    waits: Counter[str]
    kernels: Counter[str]


def profiled(step: Step, trace: Path | None) -> Profile:
    """Profile a few steps."""
    for _ in range(SETTLING):
        step()
    torch.cuda.synchronize()
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profiler:
        for _ in range(PROFILED):
            step()
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
    waits, kernels = Counter[str](), Counter[str]()
    for event in profiler.events() or ():
        waits[event.name] += event.name in WAITS
        if event.device_type == torch.profiler.DeviceType.CUDA:
            kernels[event.name] += event.self_device_time_total / 1e3 / PROFILED
    waits["cudaDeviceSynchronize"] -= 1  # the profiler's own, where it ends
    return Profile(+waits, kernels)


def show_kernels(place: str, bare: Counter[str], watched: Counter[str]) -> None:
    """Print the device time that the bare loop lacks, by kernel."""
    more = Counter({name: watched[name] - bare[name] for name in watched})
    total = sum(watched.values()) - sum(bare.values())
    print(f"\n{place}: device time a step {sum(bare.values()):.2f} ms, watched {total:+.3f} ms, of it")
    for name, ms in more.most_common(SHOWN):
        print(f"  {ms:7.3f} ms  {name[:110]}")


def measure(workload: Workload, mode: str, arms: list[str], seconds: float, rounds: int) -> Iterator[tuple[str, Step]]:
    """Print the row of one workload, and yield the steps of the arms that are profiled."""
    with contextlib.ExitStack() as stack:
        steps = {arm: Step(workload, arm, mode, stack) for arm in arms if mode == "eager" or arm not in PEERS}
        stretches = {arm: stretch(step, workload.stretch) for arm, step in steps.items()}
        warm_up(stretches.values(), seconds=seconds)
        spent = interleaved(stretches, rounds=rounds)
        bare_ms = 1e3 * sorted(spent["bare"])[len(spent["bare"]) // 2] / workload.stretch
        cells = [ratio(spent[arm], spent["bare"]) if arm in spent else "" for arm in arms if arm != "bare"]
        print("| " + " | ".join([f"{workload.title}, {mode}", f"{bare_ms:.2f}", *cells]) + " |", flush=True)
        yield from ((arm, step) for arm, step in steps.items() if arm in ("bare", "watched"))


def main() -> int:
    """Measure, print the table, and say whether a step waited."""
    asked = parser(__doc__, WORKLOADS, rounds=15)
    asked.add_argument("--modes", type=some([*MODES]), default=[*MODES], help="comma-separated")
    asked.add_argument("--arms", type=some([*ARMS]), default=["bare", "again", "watched"], help="comma-separated")
    asked.add_argument("--seconds", type=float, default=5.0, help="of warming up, for each arm")
    asked.add_argument("--trace", type=Path, help="folder for the profiler's traces")
    options = parse(asked)
    if not torch.cuda.is_available():
        print("error: scripts/benchmarks/gpu.py: torch sees no GPU, expected one with CUDA", file=sys.stderr)
        return 2
    warnings.simplefilter("error", RuntimeWarning)  # where a kernel fails, torch operations would be measured
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"| step | bare, ms | {' | '.join(arm for arm in options.arms if arm != 'bare')} |", flush=True)
    waited: dict[str, dict[str, int]] = {}
    for name, mode in itertools.product(options.only, options.modes):
        found: dict[str, Profile] = {}
        for arm, step in measure(WORKLOADS[name], mode, options.arms, options.seconds, options.rounds):
            trace = options.trace / f"{name}-{mode}-{arm}.json" if options.trace else None
            found[arm] = profiled(step, trace)
        if "watched" in found:
            show_kernels(f"{name}, {mode}", found["bare"].kernels, found["watched"].kernels)
            if found["watched"].waits:
                waited[f"{name}, {mode}"] = dict(found["watched"].waits)
    print(f"\nCalls that waited for the device, in {PROFILED} steps each: {waited or 'none'}")
    return 1 if waited else 0


if __name__ == "__main__":
    sys.exit(main())
