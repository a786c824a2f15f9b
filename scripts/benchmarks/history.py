"""What recording costs, and how fast a long run opens: `python scripts/benchmarks/history.py`."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np

from gradwatch import catalogue
from gradwatch.history.disk.writer import Writer, read
from gradwatch.history.store import History
from gradwatch.records import ActivationInfo, LayerInfo, RunInfo

STEPS = 100_000


def history_of(layers: int, activations: int, *, total_steps: int | None = None) -> History:
    """Return an empty history of a model with so many parameter tensors and activation modules."""
    named = tuple(
        LayerInfo(
            name=f"blocks.{i}.weight",
            module=f"blocks.{i}",
            module_type="Linear",
            shape=(64, 64),
            dtype="float32",
            trainable=True,
            group=0,
        )
        for i in range(layers)
    )
    acts = tuple(ActivationInfo(name=f"blocks.{i}.act", module_type="ReLU") for i in range(activations))
    return History(RunInfo(name="long", created="", layers=named, activations=acts, total_steps=total_steps))


def main() -> None:
    """Record a long run of a model of 100 layers, and open it again."""
    history = history_of(200, 100)
    random = np.random.default_rng(0)
    param_SL = random.random((len(catalogue.PARAM), 200), dtype=np.float32)
    act_SL = random.random((len(catalogue.ACT), 100), dtype=np.float32)
    with tempfile.TemporaryDirectory() as folder:
        with Writer(Path(folder) / "run", history) as writer:
            began = time.perf_counter()
            for step in range(STEPS):
                history.append(step, run={"loss": 1.0}, param_SL=param_SL, act_SL=act_SL if step % 10 == 0 else None)
                writer.append()
            recorded_s = time.perf_counter() - began
        began = time.perf_counter()
        opened = read(Path(folder) / "run")
        norms_TL = opened["grad.l2"]
        opened_s = time.perf_counter() - began
        size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    print(f"{STEPS:,} steps, 200 tensors, 100 activations")
    print(f"recording  {1e6 * recorded_s / STEPS:.1f} us a step, thinning included")
    print(f"opening    {opened_s:.2f} s, {len(norms_TL):,} steps kept, {size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
