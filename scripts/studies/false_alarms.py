"""Count false alarms on random small healthy trainings under `watch`.

    python scripts/studies/false_alarms.py --runs 200 --json healthy.json
    python scripts/studies/leave_family_out.py healthy.json        # the same with each family held out in turn
    python scripts/studies/false_alarms.py --runs 300 --longest 5000 --json long.json --keep runs/healthy

Each run draws a family of tasks, a length, an optimizer, a schedule, a precision, accumulation, clipping and the habits
of its loop from its own seed. Lengths are log-uniform from 150 steps to the longest. Runs that are in the file already
are not made again. A run whose loss does not fall by a tenth, although it should, or whose validation loss ends a
quarter above its best, is no healthy run: it is listed, not counted. Intervals are those of Clopper and Pearson 1934,
https://doi.org/10.1093/biomet/26.4.404, at 95 %.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tasks as usual
import tasks_unusual as unusual
import torch
from task_gan import adversarial
from tasks import Task
from thresholds import largest
from torch import Tensor, nn

import gradwatch
from gradwatch.history.store import History
from gradwatch.records import Severity

FAMILIES: dict[str, Callable[[random.Random, int], Task]] = {
    "classifier": usual.classifier,
    "regression": usual.regression,
    "linear": usual.linear,
    "convolutions": usual.convolutions,
    "language-model": usual.language_model,
    "recurrent": usual.recurrent,
    "factorisation": unusual.factorisation,
    "clicks": unusual.clicks,
    "autoencoder": unusual.autoencoder,
    "variational": unusual.variational,
    "contrastive": unusual.contrastive,
    "experts": unusual.experts,
    "fine-tuning": unusual.finetuning,
    "graph": unusual.graph,
    "denoiser": unusual.denoiser,
    "policy-gradient": unusual.policy_gradient,
    "q-learning": unusual.q_learning,
    "physics": unusual.physics,
    "reversal": unusual.reversal,
}
NAMES = (*FAMILIES, "adversarial")

SHORTEST = 150
"""Steps of the shortest run."""

MOST_DIALED = 400
"""Longest run up to which the nearness to each threshold is measured: later rows are thinned, and it takes long."""

MOST_BATCHES, MOST_SAMPLES = 5_000, 40_000
"""Micro-batches, and samples but for accumulation, of a run: bounds its cost. Its length is left as it was drawn."""


def optimizer_of(rng: random.Random, task: Task) -> torch.optim.Optimizer:
    """Return an optimizer with a rate within a factor of three of one that suits the task."""
    params = [p for p in task.model.parameters() if p.requires_grad]
    factor = 10 ** rng.uniform(-0.5, 0.5)
    kinds = ["adam", "adamw", "adamw", "rmsprop"] + (["sgd", "momentum"] if task.sgd_rate else [])
    kind, rate = rng.choice(kinds), factor * task.rate
    if kind == "sgd":
        return torch.optim.SGD(params, lr=factor * (task.sgd_rate or 0.0))
    if kind == "momentum":
        return torch.optim.SGD(
            params, lr=factor * (task.sgd_rate or 0.0) / 5, momentum=0.9, weight_decay=rng.choice([0, 5e-4])
        )
    if kind == "rmsprop":
        return torch.optim.RMSprop(params, lr=rate / 3)
    if kind == "adam":
        return torch.optim.Adam(params, lr=rate)
    decayed, rest = [p for p in params if p.ndim >= 2], [p for p in params if p.ndim < 2]
    groups: list[dict[str, Any]] = (
        [{"params": decayed}, {"params": rest, "weight_decay": 0.0}] if rest and decayed else [{"params": params}]
    )
    return torch.optim.AdamW(groups, lr=rate, weight_decay=rng.choice([0.01, 0.1]))


def schedule_of(rng: random.Random, optimizer: torch.optim.Optimizer, steps: int) -> Any:
    """Return a schedule of the learning rate, or None."""
    schedules = torch.optim.lr_scheduler
    kind = rng.choice(["none", "none", "cosine", "milestones", "warm-up", "one-cycle", "restarts"])
    if kind == "cosine":
        return schedules.CosineAnnealingLR(optimizer, steps)
    if kind == "milestones":
        return schedules.MultiStepLR(optimizer, [steps // 2, 3 * steps // 4], 0.1)
    if kind == "warm-up":
        return schedules.LambdaLR(optimizer, lambda s: min(1, (s + 1) / 30) * (0.1 + 0.9 * (1 - s / steps)))
    if kind == "one-cycle":
        return schedules.OneCycleLR(optimizer, [g["lr"] for g in optimizer.param_groups], total_steps=steps + 1)
    return schedules.CosineAnnealingWarmRestarts(optimizer, max(steps // 3, 1)) if kind == "restarts" else None


def train(task: Task, rng: random.Random, steps: int, watched: dict[str, Any]) -> tuple[History, str]:
    """Train under `watch`, with habits that are drawn, and return the history and what they were.

    Args:
        task: What is trained.
        rng: Source of chance.
        steps: Optimizer steps.
        watched: Further arguments of `watch`.
    """
    optimizer = optimizer_of(rng, task)
    schedule = schedule_of(rng, optimizer, steps)
    precision = rng.choice(["fp32"] * 6 + (["bf16", "fp16"] if task.is_half_safe else []))
    accumulate, clip = (
        min(rng.choice([1, 1, 1, 2, 4]), max(MOST_BATCHES // steps, 1)),
        rng.choice([None, None, 1.0, 5.0]),
    )
    units = rng.choice([1.0, 1.0, 1.0, 100.0, 0.01]) if not isinstance(optimizer, torch.optim.SGD) else 1.0
    clears_first, to_none, every = rng.random() < 0.5, rng.random() < 0.8, rng.choice([0, 0, 20, 50])
    observes, hands_batch = rng.random() < 0.5, rng.random() < 0.7
    scaler = torch.amp.GradScaler("cpu", init_scale=rng.choice([2.0**16, 2.0**10])) if precision == "fp16" else None
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    monitor = gradwatch.watch(task.model, optimizer, scaler=scaler, accumulate=accumulate, **watched)
    for step in range(steps):
        if clears_first:
            optimizer.zero_grad(set_to_none=to_none)
        losses, inputs = [], []
        for _ in range(accumulate):
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                loss, batch = task.loss()
            loss = units * loss
            (loss if scaler is None else scaler.scale(loss)).div(accumulate).backward()
            losses.append(loss.detach())
            inputs.append(batch)
        if scaler is not None:
            scaler.unscale_(optimizer)
        norm = None
        if clip:
            if observes:
                monitor.observe()
            norm = nn.utils.clip_grad_norm_(task.model.parameters(), clip)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        if not clears_first:
            optimizer.zero_grad(set_to_none=to_none)
        if schedule is not None:
            schedule.step()
        monitor.step(
            torch.stack(losses).mean(),
            batch=inputs if hands_batch else None,
            val_loss=_validate(task) if every and step % every == every - 1 else None,
            grad_norm=None if observes else norm,
        )
    monitor.close()
    name = f"{type(optimizer).__name__} {optimizer.param_groups[0]['lr']:.2g} {type(schedule).__name__} {precision}"
    return monitor.history, f"{name} x{accumulate} clip {clip} loss x{units:g}"


def _validate(task: Task) -> Tensor | None:
    if task.validate is None:
        return None
    task.model.eval()
    with torch.no_grad():
        loss = task.validate()
    task.model.train()
    return loss


def run(seed: int, families: list[str], *, longest: int, keep: Path | None) -> dict[str, Any]:
    """Train one random run and return what was found in it, as plain data.

    Args:
        seed: Of everything that is drawn.
        families: Names, of which the seed takes one.
        longest: Largest number of steps.
        keep: Folder that gets the run directory; None keeps nothing.
    """
    rng = random.Random(seed)
    torch.manual_seed(seed)
    family = families[seed % len(families)]
    steps, size = round(SHORTEST * (longest / SHORTEST) ** rng.random()), rng.choice([8, 16, 32, 64, 128])
    size = min(size, max(MOST_SAMPLES // steps, 8))
    watched = {} if keep is None else {"run": keep / str(seed), "sinks": {"html": {"enabled": False}}}
    began = time.perf_counter()
    if family == "adversarial":
        (history, habits), falls = adversarial(rng, max(size, 16), steps, watched), False
    else:
        task = FAMILIES[family](rng, size)
        (history, habits), falls = train(task, rng, steps, watched), task.falls
    loss_T = history["loss"]
    first, last = float(np.mean(loss_T[:5])), float(np.median(loss_T[-20:]))
    val_V = history["val_loss"][np.isfinite(history["val_loss"])]
    overfits = len(val_V) > 0 and bool(val_V[-1] > 1.25 * val_V.min())
    learned = math.isfinite(last) and (not falls or last < 0.9 * first) and not overfits
    return {
        "seed": seed,
        "family": family,
        "habits": f"{habits} batch {size} steps {steps}",
        "learned": learned,
        "loss": [first, last],
        "findings": [[f.kind, str(f.severity), f.layer, f.step, f.message] for f in history.findings],
        "largest": largest(history) if learned and longest <= MOST_DIALED else {},
        "seconds": round(time.perf_counter() - began, 1),
    }


def interval(hits: int, runs: int) -> tuple[float, float]:
    """Return the 95 % interval of Clopper and Pearson for a rate, by bisection of the binomial distribution."""

    def solve(is_low: Callable[[float], bool]) -> float:
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if is_low(middle) else (low, middle)
        return low

    def at_most(k: int, rate: float) -> float:
        return sum(math.comb(runs, i) * rate**i * (1 - rate) ** (runs - i) for i in range(k + 1))

    lower = 0.0 if hits == 0 else solve(lambda rate: 1 - at_most(hits - 1, rate) < 0.025)
    upper = 1.0 if hits == runs else solve(lambda rate: at_most(hits, rate) > 0.025)
    return lower, upper


def table(rows: list[dict[str, Any]]) -> str:
    """Return how many healthy runs raised what, with intervals."""
    healthy = [r for r in rows if r["learned"]]
    loud = [{k for k, severity, *_ in r["findings"] if Severity.parse(severity) >= Severity.WARNING} for r in healthy]
    critical = [{k for k, severity, *_ in r["findings"] if severity == "critical"} for r in healthy]
    n = len(healthy)

    def line(name: str, hits: int, of: int) -> str:
        low, high = interval(hits, of) if of else (0.0, 1.0)
        return (
            f"{name:28} {hits:4} of {of:4}   {100 * hits / max(of, 1):5.1f} %   [{100 * low:.1f}, {100 * high:.1f}] %"
        )

    lines = [f"{len(rows)} runs, {n} of them learned and did not overfit; the others are not counted", ""]
    lines += [line("any warning", sum(map(bool, loud)), n), line("any critical", sum(map(bool, critical)), n), ""]
    kinds = Counter(kind for kinds in loud for kind in kinds)
    lines += [line(kind, hits, n) for kind, hits in kinds.most_common()] + [""]
    for family in NAMES:
        of = [kinds for r, kinds in zip(healthy, loud, strict=True) if r["family"] == family]
        lines += [line(family, sum(map(bool, of)), len(of))] if of else []
    return "\n".join(lines)


def main() -> None:
    """Train the runs and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first run; the others follow")
    parser.add_argument("--family", action="append", choices=NAMES, help="only these; may be given more than once")
    parser.add_argument("--longest", type=int, default=400, help="steps of the longest run (default: 400)")
    parser.add_argument("--json", type=Path, help="file with what was found in each run; its runs are not made again")
    parser.add_argument("--keep", type=Path, help="folder that gets a run directory per run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    seeds = range(options.seed, options.seed + options.runs)
    rows = json.loads(options.json.read_text()) if options.json and options.json.exists() else []
    for seed in sorted({*seeds} - {row["seed"] for row in rows}):
        row = run(seed, options.family or list(NAMES), longest=options.longest, keep=options.keep)
        rows.append(row)
        alarms = [f"{k} ({s}) {layer or ''}@{step}" for k, s, layer, step, _ in row["findings"] if s != "info"]
        state = "ok   " if row["learned"] else "ill  "
        start, end = row["loss"]
        print(
            f"{seed:5} {state} {row['family']:16} {row['habits']:76} {start:9.3g} -> {end:<9.3g} {'; '.join(alarms)}",
            file=sys.stderr,
        )
        if options.json:
            options.json.write_text(json.dumps(rows))
    print(table(rows))


if __name__ == "__main__":
    main()
