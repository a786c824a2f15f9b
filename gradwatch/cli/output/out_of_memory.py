"""Show the memory plan of a step that did not fit, and the smallest change that fits."""

from __future__ import annotations

import gc
import json
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from gradwatch.cli.output.console import output, print_message
from gradwatch.cli.output.plan import print_advice, print_patch, print_plan
from gradwatch.cli.output.progress import progress_line
from gradwatch.config.load import load_config
from gradwatch.config.sections.root import Config
from gradwatch.errors import OutOfMemoryError, raised
from gradwatch.planning.advice import Advisor
from gradwatch.planning.checkpointing import settle
from gradwatch.planning.training import ConfigPlanner
from gradwatch.probe.memory.in_use import cuda_memory_left, host_memory_left


def print_failed_step(error: OutOfMemoryError, file: Path, overrides: Sequence[str], changes: Sequence[Path]) -> None:
    """Print the plan of the step of a training that ran out of memory, and the changes that would fit.

    Args:
        error: The failure. It is freed of the frames of the training, which hold its tensors.
        file: The config.
        overrides: Its overrides.
        changes: Its files of changes.
    """
    error.__cause__ = error.__context__ = None
    traceback.clear_frames(error.__traceback__)
    gc.collect()

    def load(settings: Mapping[str, Any]) -> Config:
        texts = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
        return load_config(file, [*overrides, *texts], changes=changes)

    try:
        planner = ConfigPlanner(load)
        settle(planner)
        plan = planner.plan()
    except Exception as failure:  # the memory may not be enough for the data, and the step may be of any kind
        print_message("note", f"the step cannot be planned: {raised(failure)}")
        return
    # what was free without the training, which is over
    left = int(cuda_memory_left(torch.device("cuda")) if plan.device == "cuda" else host_memory_left())
    print_plan(output(), plan, limit=left, measured=None)
    if plan.peak_bytes <= left:
        print_message("note", "the step itself would fit: something else took the memory, or it grew over the steps")
    elif plan.is_traced:
        with progress_line(hidden=False) as progress:
            advised = Advisor(planner, left, progress=progress).advise()
        print_advice(output(), advised)
        if best := advised.cheapest:
            print_patch(output(), best.text, best.changes, None, fits=False)
