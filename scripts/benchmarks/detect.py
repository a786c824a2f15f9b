"""What detecting costs per step, and how fast a long run is diagnosed: `python scripts/benchmarks/detect.py`."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from history import history_of

from gradwatch import catalogue
from gradwatch.detect import Detector, detectors
from gradwatch.diagnose.rank import diagnose
from gradwatch.history.disk.writer import Writer, read
from gradwatch.history.store import History, Rows, SampledStep, concatenate
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.pipeline.ingest import Ingest
from gradwatch.pipeline.redetect import redetect

WARM = 300
"""Steps before the clock runs: detectors look at most 256 steps back."""
TOGETHER = 32
"""Steps that come together: so many as a training of small steps makes in the second between two turns."""


def per_step(layers: int, activations: int, steps: int) -> float:
    """Return microseconds per step of all detectors together, as the pipeline asks them: of rows that come together.

    Args:
        layers: Parameter tensors of the made-up run, which is healthy, as nearly all steps are.
        activations: Activation modules.
        steps: Steps to measure.
    """
    made = Synthetic(layers=layers, steps=WARM + steps, activations=activations, width=64)
    history = History(made.info)
    blocks = [concatenate(part) for part in _parts(made)]
    nobody_s = min(_taking_in(history, blocks, []) for _ in range(2))  # the first finds nothing in the caches
    return 1e6 * (_taking_in(history, blocks, detectors()) - nobody_s) / steps


def _parts(made: Synthetic) -> Iterator[list[Rows]]:
    """Yield the rows of a run as they come together."""
    part: list[Rows] = []
    for history in made.replay():
        step = history.step
        (steps_T, param_TSL), (_, run_TS1) = history.param.since(step - 1), history.run.since(step - 1)
        act_SA = history.act.since(step - 1)[1][0].copy() if history.act.last_step == step else None
        samples = () if act_SA is None else (SampledStep(0, act_SA),)
        part.append(Rows(steps_T.copy(), run_TS1[:, :, 0].copy(), param_TSL.copy(), samples))
        if len(part) == TOGETHER:
            yield part
            part = []
    if part:
        yield part


def _taking_in(like: History, blocks: list[Rows], asked: Sequence[Detector]) -> float:
    """Return the least processor time of three that what comes after the warm-up takes, with these detectors."""
    taken_s = []
    for _ in range(3):
        ingest, seconds = Ingest(History(like.info), detectors=asked), 0.0
        for rows in blocks:
            began = time.thread_time()
            ingest.ingest(rows)
            seconds += (time.thread_time() - began) * (rows.steps_T[0] >= WARM)
        taken_s.append(seconds)
    return min(taken_s)


def record(folder: Path, *, layers: int, steps: int) -> None:
    """Write a run of so many steps, whose gradients are noise around a level that falls, and which dies at its end."""
    history = history_of(layers, 100)
    rng = np.random.default_rng(0)
    level_L = 0.1 * np.exp(0.4 * rng.standard_normal(layers))
    param_SL = np.empty(history.param.shape, np.float32)
    at = {name: i for i, name in enumerate(catalogue.PARAM_NAMES)}
    act_SL = np.full(history.act.shape, 0.1, np.float32)
    with Writer(folder, history) as writer:
        for step in range(steps):
            loss = 0.1 + 2.2 / (1 + step / 1000)
            norm_L = level_L * np.exp(0.3 * rng.standard_normal(layers)) * np.sqrt(loss)
            param_SL[:] = 0
            param_SL[at["grad.l2"]], param_SL[at["grad.absmax"]] = norm_L, norm_L / 10
            param_SL[at["weight.l2"]] = 8.0 if step % 10 == 0 else np.nan
            param_SL[at["update.ratio"]] = 1e-3 if step % 10 == 0 else np.nan
            if step > steps - 50:
                param_SL[at["grad.l2"], layers // 2] = 0
            norm = float(np.linalg.norm(param_SL[at["grad.l2"]]))
            run = {"loss": loss, "lr.0": 1e-3, "loss_scale": 1.0, "skipped": 0.0, "step_ms": 10.0}
            run |= {"grad_norm.before_clip": norm, "grad_norm.after_clip": norm}
            history.append(step, run=run, param_SL=param_SL, act_SL=act_SL if step % 10 == 0 else None)
            writer.append()
            if step % 10 == 0:
                _report(history, writer)


def _report(history: History, writer: Writer) -> None:
    for detector in detectors():
        for finding in detector.detect(history):
            if history.report(finding):
                writer.report(finding)


def main() -> None:
    """Measure both."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=1000, help="parameter tensors")
    parser.add_argument("--steps", type=int, default=100_000, help="steps of the run that is diagnosed")
    parser.add_argument("--keep", type=Path, help="where the run lies, or is to be written, for a second measurement")
    options = parser.parse_args()
    for layers, activations in ((4, 2), (60, 20), (options.layers, 100)):
        total_us = per_step(layers, activations, 600)
        print(f"detecting   {layers:5} tensors: {total_us:6.1f} us a step")
    with contextlib.ExitStack() as stack:
        folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory())) / "run"
        if not folder.exists():
            record(folder, layers=options.layers, steps=options.steps)
        began = time.perf_counter()
        history = read(folder)
        loaded_s, began = time.perf_counter() - began, time.perf_counter()
        found = diagnose(history)
        diagnosed_s, began = time.perf_counter() - began, time.perf_counter()
        again = redetect(history, detectors())
        again_s = time.perf_counter() - began
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    kept = f"{size / 1e6:.0f} MB, {len(history.param):,} steps kept"
    print(f"{history.step + 1:,} steps, {options.layers:,} tensors: {kept}")
    print(f"opening     {loaded_s:.2f} s")
    print(f"diagnosing  {diagnosed_s:.2f} s: {'; '.join(f'{d.cause} ({d.certainty:.2f})' for d in found)}")
    print(f"asking all detectors again about every step that is kept  {again_s:.2f} s, {len(again.findings)} findings")


if __name__ == "__main__":
    main()
