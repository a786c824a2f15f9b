"""Compare the learning rate that a diagnosis suggests with rates around it.

    python scripts/studies/suggested_rates.py

Each family of `studies/false_alarms.py` is trained with Adam at 30 and 300 times its usual rate. Then it is trained
from the same weights at the rate that is suggested, at a tenth of it and at ten times it. The table has the mean of the
last losses. Families in which such a rate is another fault, or none, are left out.
"""

from __future__ import annotations

import argparse
import random
import re
import statistics

import torch
from false_alarms import FAMILIES
from planted_faults import LEFT_OUT
from torch import Tensor

import gradwatch
from gradwatch.diagnose.rank import diagnose
from gradwatch.history.store import History

FACTORS = (30.0, 300.0)
SUGGESTED = re.compile(r"lower the learning rate to (\S+)")
LAST_STEPS = 15


def train(
    family: str, *, seed: int, steps: int, factor: float = 1.0, rate: float | None = None
) -> tuple[float, History]:
    """Train a family at a multiple of its usual rate, or at a rate, and return the mean of the last losses."""
    torch.manual_seed(seed)
    task = FAMILIES[family](random.Random(seed), 32)
    params = [p for p in task.model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(params, lr=rate or factor * task.rate)
    losses = []
    with gradwatch.watch(task.model, optimizer) as monitor:
        for _ in range(steps):
            loss, batch = task.loss()
            loss.backward()
            optimizer.step()
            task.model.zero_grad()
            monitor.step(loss, batch=batch if isinstance(batch, Tensor) else None)
            losses.append(loss.item())
    return statistics.fmean(losses[-LAST_STEPS:]), monitor.history


def suggested_rate(history: History) -> float | None:
    """Return the rate of the first remedy that lowers it, or None."""
    texts = (remedy.text for diagnosis in diagnose(history) for remedy in diagnosis.remedies)
    return next((float(found[1]) for text in texts if (found := SUGGESTED.match(text))), None)


def main() -> None:
    """Print a row for each training whose rate is said to be too high."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=100, help="seed of the first family; the next one has the next")
    parser.add_argument("--steps", type=int, default=120)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print("| family | usual rate | rate | suggested | loss | a tenth | as suggested | ten times | usual rate |")
    print("|---|---|---|---|---|---|---|---|---|")
    lower = higher = rows = 0
    for seed, family in enumerate((name for name in FAMILIES if name not in LEFT_OUT), start=asked.seed):
        for factor in FACTORS:
            loss, history = train(family, seed=seed, steps=asked.steps, factor=factor)
            rate = suggested_rate(history)
            if rate is None:
                continue
            tries = (rate / 10, rate, min(10 * rate, history["lr.0"][0]))
            tenth, same, tenfold = (train(family, seed=seed, steps=asked.steps, rate=it)[0] for it in tries)
            usual, base = train(family, seed=seed, steps=asked.steps)[0], history["lr.0"][0] / factor
            print(
                f"| {family} | {base:g} | {factor * base:g} | {rate:g} | {loss:.3g} | {tenth:.3g} | {same:.3g} | "
                f"{tenfold:.3g} | {usual:.3g} |",
                flush=True,
            )
            rows, lower, higher = rows + 1, lower + (tenth < same), higher + (tenfold < same)
    print(f"\nOf {rows}, a tenth of the suggestion gives a lower loss in {lower}, and ten times it in {higher}.")


if __name__ == "__main__":
    main()
