"""Count how often a planted fault is found and explained, and how sure the diagnosis was.

    python scripts/studies/planted_faults.py --runs 120 --json faulty.json
    python scripts/studies/leave_family_out.py healthy.json --faulty faulty.json  # with each family held out

Each run draws a family of `studies/false_alarms.py` and one of the faults below from its own seed; the fault is planted
into the healthy training, at a size that is drawn too. Nobody looks whether it does harm in that run, so that a gentle
one may rightly go unreported (nor can a model of one layer be cut). The second table is a reliability diagram in
numbers (DeGroot & Fienberg 1983, https://doi.org/10.2307/2987588): of the diagnoses that said to be so sure, how many
led with a finding of the planted kind, or of one that the table of causes derives from it.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from false_alarms import FAMILIES, interval
from tasks import Task
from thresholds import largest
from torch import Tensor, nn

import gradwatch
from gradwatch.diagnose.causes import CAUSES
from gradwatch.diagnose.rank import diagnose
from gradwatch.history.store import History
from gradwatch.records import Severity

GOOD_SIGN = 4.0
"""Odds from which a kind of finding counts as a sign of a cause (`gradwatch.diagnose.causes`)."""

BINS = (0.0, 0.5, 0.7, 0.85, 0.93, 1.0)
"""Edges of the certainties that are counted together."""

LEFT_OUT = ("policy-gradient", "q-learning", "fine-tuning", "physics")
"""Families whose loss or rate makes most of these faults something else, or none, or cannot be cut."""


def scale_weights(model: nn.Module, rng: random.Random) -> None:
    """Draw all weight matrices too large."""
    factor = rng.choice([6.0, 10.0, 20.0])
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim >= 2:
                param.mul_(factor)


def cut(model: nn.Module, rng: random.Random) -> None:
    """Detach what the first layer gives, where another one is left to learn."""
    inner = [m for m in model.modules() if type(m) in (nn.Linear, nn.Conv2d)]  # attention calls none of its own
    if len(inner) > 1:
        inner[0].register_forward_hook(lambda module, inputs, output: output.detach())


PLANTS: dict[str, Callable[[nn.Module, random.Random], None] | None] = {
    "constant-batch": None,
    "learning-rate-too-high": None,
    "learning-rate-too-low": None,
    "missing-zero-grad": None,
    "no-gradient": cut,
    "not-optimized": None,
    "poor-initialization": scale_weights,
}


def train(task: Task, fault: str, rng: random.Random, steps: int) -> History:
    """Train a task with a fault under `watch` and return the history."""
    plant = PLANTS[fault]
    if plant is not None:
        plant(task.model, rng)
    factor = {"learning-rate-too-high": rng.choice([300, 1000]), "learning-rate-too-low": 1e-5}.get(fault, 1.0)
    params = [p for p in task.model.parameters() if p.requires_grad]
    held = params[: (len(params) + 1) // 2] if fault == "not-optimized" else params
    optimizer = torch.optim.Adam(held, lr=factor * task.rate)
    seed, drawn = rng.randrange(2**31), rng.getstate()
    with gradwatch.watch(task.model, optimizer) as monitor:
        for _ in range(steps):
            if fault == "constant-batch":
                torch.manual_seed(seed)
                rng.setstate(drawn)
            loss, batch = task.loss()
            loss.backward()
            optimizer.step()
            if fault != "missing-zero-grad":
                task.model.zero_grad()
            monitor.step(loss, batch=batch if isinstance(batch, Tensor) else None)
    return monitor.history


def run(seed: int) -> dict[str, Any]:
    """Train one faulty run and return what was found in it, as plain data."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    family = rng.choice([name for name in FAMILIES if name not in LEFT_OUT])
    fault = rng.choice(list(PLANTS))
    history = train(FAMILIES[family](rng, rng.choice([16, 32, 64])), fault, rng, rng.choice([100, 150, 200]))
    loud = [f for f in history.findings if f.severity >= Severity.WARNING]
    first = next((d for d in diagnose(history) if d.severity >= Severity.WARNING), None)
    return {
        "seed": seed,
        "family": family,
        "fault": fault,
        "kinds": sorted({f.kind for f in loud}),
        "cause": first.cause if first else None,
        "certainty": first.certainty if first else None,
        "right": first is not None and is_right(first.cause_id, first.findings[0].kind, fault),
        "largest": largest(history),
    }


def is_right(cause_id: str, leading: str, fault: str) -> bool:
    """Say whether a cause is one that the planted kind is a good sign of, or leads with a finding of that kind."""
    leads = next((c.leads for c in CAUSES if c.id == cause_id), {})
    return leading == fault or leads.get(fault, 0.0) >= GOOD_SIGN


def table(rows: list[dict[str, Any]]) -> str:
    """Return per fault what was found and explained, and the certainties against the share that was right."""
    lines = [f"{'fault':26} {'runs':>5} {'found':>6} {'any alarm':>10} {'explained':>10}"]
    for fault in PLANTS:
        of = [r for r in rows if r["fault"] == fault]
        found, alarmed = sum(fault in r["kinds"] for r in of), sum(bool(r["kinds"]) for r in of)
        lines.append(f"{fault:26} {len(of):5} {found:6} {alarmed:10} {sum(r['right'] for r in of):10}")
    lines += ["", f"{'certainty said':>18} {'diagnoses':>10} {'mean':>6} {'right':>6}   95 % interval"]
    for low, high in pairwise(BINS):
        of = [r for r in rows if r["certainty"] is not None and low < r["certainty"] <= high]
        if of:
            right, mean = sum(r["right"] for r in of), sum(r["certainty"] for r in of) / len(of)
            bounds = " to ".join(f"{bound:.2f}" for bound in interval(right, len(of)))
            lines.append(f"{low:8.2f} to {high:6.2f} {len(of):10} {mean:6.2f} {right / len(of):6.2f}   {bounds}")
    return "\n".join(lines)


def main() -> None:
    """Train the runs and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first run; the others follow")
    parser.add_argument("--json", type=Path, help="where to write what was found in each run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for seed in range(options.seed, options.seed + options.runs):
        rows.append(run(seed))
        row = rows[-1]
        said = f"{row['cause']} ({row['certainty']:.2f})" if row["cause"] else "quiet"
        blame = "right" if row["right"] else "-"
        print(f"{seed:5} {row['family']:16} {row['fault']:24} {blame:6} {said}: {row['kinds']}", file=sys.stderr)
        if options.json:
            options.json.write_text(json.dumps(rows))
    print(table(rows))


if __name__ == "__main__":
    main()
