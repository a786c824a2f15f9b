"""Compare the planned peak of memory with the peak that a real step allocates, for the shipped configs.

    python scripts/benchmarks/benchmark_plan.py [CONFIG ...]

Allocated is what the profiler of torch sees of two steps on the CPU, workspace of the kernels included. Tracked is the
same account as in the plan, kept while the steps run. A config whose data is not on this machine is left out.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from gradwatch.config.load import load_config
from gradwatch.config.sections.root import Config
from gradwatch.errors import GradwatchError
from gradwatch.planning.training import ConfigPlanner
from gradwatch.train.training_state import TrainingState

CONFIGS = Path("configs")
DOWNLOADED = ("cifar10-resnet18.yaml", "mnist-mlp.yaml")


def allocated_peak(config: Config) -> int:
    """Return the peak bytes of two real steps of a config."""
    training = TrainingState.build(config)
    window = list(itertools.islice(training.batches.epoch(0), config.train.accumulate))
    stepper = training.stepper(lambda: 1.0)
    held = (*training.model.parameters(), *training.model.buffers(), *tree_leaves(window))
    before = sum(tensor.nbytes for tensor in held if isinstance(tensor, Tensor))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        for _ in range(2):
            stepper.run(window)
    events: list[Any] = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes: list[int] = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return before + max(itertools.accumulate(sizes))


def main(paths: list[Path]) -> None:
    """Print a line for each config."""
    print(f"{'config':44} {'planned':>10} {'tracked':>10} {'allocated':>10} {'error':>7} {'time':>6}")
    for path in paths:

        def load(changes: Any, path: Path = path) -> Config:
            settings = {"train.device": "cpu", "data.workers": 0, "data.download": False, **changes}
            if path.name not in DOWNLOADED:  # other data has no such setting
                del settings["data.download"]
            return load_config(path, [f"{key}={json.dumps(value)}" for key, value in settings.items()])

        try:
            planner = ConfigPlanner(load)
            began = time.perf_counter()
            planned = planner.plan()
            seconds = time.perf_counter() - began
        except GradwatchError as error:
            print(f"{path!s:44} left out: {str(error)[:60]}")
            continue
        tracked, allocated = planner.measure().peak_bytes, allocated_peak(load({}))
        sizes = " ".join(f"{nbytes / 1e6:10.3f}" for nbytes in (planned.peak_bytes, tracked, allocated))
        print(f"{path!s:44} {sizes} {100 * (planned.peak_bytes / allocated - 1):+6.1f}% {seconds:5.1f}s", flush=True)


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]] or sorted((*CONFIGS.glob("*.yaml"), *CONFIGS.glob("clinic/*.yaml"))))
