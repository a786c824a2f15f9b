"""Check on a GPU what the tests check without one: equal numbers, equal trainings, findings, and no waiting.

    python -m scripts.gpu_checks [--only numbers,twins,...] [--seconds 60]

Each part prints one line for each thing that it compares, beginning with `ok` or `WRONG`, and a part that raises prints
its traceback. The exit code is 1 if anything is wrong, and 2 if torch sees no GPU. `--seconds` ends a part that takes
longer.

numbers   gradient statistics, histograms, checksums and update sizes, on the GPU and on the CPU, also of subnormal
          values, of views that are not contiguous or not aligned, and of two hundred million values
twins     a training with and without watching, bit by bit: fp32, bf16, GradScaler, clipping, accumulation
devices   one training on the GPU and on the CPU: the recorded rows agree
waits     the places in gradwatch that wait for the device in 150 watched steps, as torch reports them
faults    a NaN, a loss scale that collapses, and dead units are found on the GPU
sequences recurrent layers that run along the batch are found, and others are not
graph     a watched step that is captured in a CUDA graph records what the eager step records
compiled  a watched step under torch.compile is recorded, and trains as without watching
config    `gradwatch train` on CUDA: an interrupted run that resumes, and `gradwatch replay`, bit by bit
plan      the planned peak of memory next to the peak of the allocator
ranks     DDP and FSDP2 by NCCL, as one process
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
import traceback
from collections.abc import Callable

import torch

from scripts.gpu_checks.memory import check_plan
from scripts.gpu_checks.numbers import check_numbers
from scripts.gpu_checks.programs import check_compiled, check_config, check_graph, check_ranks
from scripts.gpu_checks.report import REPORT, expect
from scripts.gpu_checks.trainings import check_devices, check_faults, check_sequences, check_twins, check_waits

PARTS: dict[str, Callable[[], None]] = {
    "numbers": check_numbers,
    "twins": check_twins,
    "devices": check_devices,
    "waits": check_waits,
    "faults": check_faults,
    "sequences": check_sequences,
    "graph": check_graph,
    "compiled": check_compiled,
    "config": check_config,
    "plan": check_plan,
    "ranks": check_ranks,
}


def main() -> int:
    """Run the parts."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--only", default=",".join(PARTS))
    asked.add_argument("--seconds", type=int, default=60)
    options = asked.parse_args()
    if not torch.cuda.is_available():
        print("error: scripts.gpu_checks: torch sees no GPU, expected one with CUDA", file=sys.stderr)
        return 2

    def stop(*_: object) -> None:
        raise TimeoutError(f"longer than {options.seconds} s")

    signal.signal(signal.SIGALRM, stop)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for part in options.only.split(","):
        began = time.perf_counter()
        print(f"== {part}", flush=True)
        signal.alarm(options.seconds)
        try:
            PARTS[part]()
        except Exception:  # of any kind: the other parts go on
            expect(False, "\n".join(traceback.format_exc().splitlines()[-12:]))
        signal.alarm(0)
        print(f"   {part}: {time.perf_counter() - began:.1f} s", flush=True)
    return 1 if REPORT.failures else 0


if __name__ == "__main__":
    sys.exit(main())
