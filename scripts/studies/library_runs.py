"""What is said of the trainings of others: models, losses and trainers of published libraries under `watch`.

    pip install stable-baselines3 pytorch-tabnet deepxde skorch pycox transformers timm segmentation-models-pytorch \
        lightly pytorch-metric-learning vector-quantize-pytorch nflows gpytorch torchdiffeq torch-geometric \
        denoising-diffusion-pytorch neuraloperator
    DDE_BACKEND=pytorch python scripts/studies/library_runs.py

Each is a line: its steps, the loss at both ends, and every finding at warning or above. One that cannot be made (a
library that is missing, or has changed) says so and is not counted. `--only tabnet` runs those with that in their name.
"""

from __future__ import annotations

import argparse
import functools
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from library_tasks import TRAININGS
from torch import Tensor

import gradwatch
from gradwatch import Monitor
from gradwatch.records import Severity


@contextmanager
def watched(seen: list[Monitor], model: Any, optimizer: Any) -> Iterator[None]:
    """Watch a model while a trainer that knows nothing of it trains: the loss is what `backward` is called on."""
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    backward: Any = Tensor.backward
    losses = [torch.tensor(float("nan"))]

    def noting(loss: Tensor, *args: Any, **options: Any) -> None:
        losses[0] = loss
        backward(loss, *args, **options)

    with gradwatch.watch(model, optimizers) as monitor:
        seen.append(monitor)
        last = optimizers[-1].register_step_post_hook(lambda *_: monitor.step(losses[0]))
        Tensor.backward = noting  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            Tensor.backward = backward  # type: ignore[method-assign]
            last.remove()


def told(name: str) -> tuple[str, bool]:
    """Train and return a line, and whether there was a finding at warning or above."""
    seen: list[Monitor] = []
    torch.manual_seed(0)
    TRAININGS[name](functools.partial(watched, seen))
    (monitor,) = seen
    loss_T = monitor.history["loss"]
    loud = [f for f in monitor.findings() if f.severity >= Severity.WARNING]
    ends = f"{loss_T[:8].mean():.3g} to {loss_T[-8:].mean():.3g}"
    lines = [f"{name:36} {len(loss_T):5} steps  loss {ends}", *(f"    {f.kind}: {f.message}" for f in loud)]
    return "\n".join(lines), bool(loud)


def main() -> None:
    """Print a line for each training, and how many had findings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of a name")
    asked = parser.parse_args().only.lower()
    warnings.simplefilter("ignore")
    counted = alarmed = 0
    for name in TRAININGS:
        if asked not in name.lower():
            continue
        try:
            line, is_alarmed = told(name)
        except Exception as error:  # of a library that nobody here has written
            line = f"{name:36} cannot be made: {type(error).__name__}: {str(error).splitlines()[0]}"
        else:
            counted, alarmed = counted + 1, alarmed + is_alarmed
        print(line, flush=True)
    print(f"\n{alarmed} of {counted} trainings with a finding at warning or above")
    sys.exit(0 if counted else 2)


if __name__ == "__main__":
    main()
