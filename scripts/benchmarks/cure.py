"""Measure how many faults of the zoo that a config can express are cured: train, diagnose, patch, train again."""

from __future__ import annotations

import argparse
import fnmatch
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
import torch
import yaml

from gradwatch.config.load import load_config
from gradwatch.data import digits
from gradwatch.diagnose.rank import diagnose
from gradwatch.history.disk.writer import read
from gradwatch.records import Severity
from gradwatch.replay.config_change import config_of
from gradwatch.replay.cure import TOLERANCE, find_cure, hardly_learns, to_yaml
from gradwatch.replay.trials.ab_test import SeedPair, compare_configs
from gradwatch.replay.trials.runner import TrialRunner
from gradwatch.replay.verify.verify import verify
from gradwatch.train.loop import train

QUIET = ["sinks.terminal.enabled=false", "sinks.tensorboard.enabled=false"]
CASES = Path(__file__).parents[1] / "studies" / "planted_faults.yaml"
SEEDS = 2
"""The run's own seed, and another."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Ill:
    """A config that is ill as a case of the zoo is.

    Args:
        zoo: Name of the case whose mechanism it has.
        kinds: Findings of which one must be made: what the case is labelled with, or may be as well.
        config: Its text; `FOLDER` stands for where the data files are.
        note: What makes it another one, where a case has more than one.
    """

    zoo: str
    kinds: tuple[str, ...]
    config: str
    note: str = ""

    @property
    def name(self) -> str:
        """What it is called."""
        return f"{self.zoo}-{self.note}" if self.note else self.zoo


def main() -> None:
    """Train, diagnose and cure each config, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="*", help="names of configs, such as 'digits_*'")
    parser.add_argument("--within", type=float, default=1800.0, help="seconds for the search of each cure")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = yaml.safe_load(CASES.read_text())
    ills = [Ill(**case | {"kinds": tuple(case["kinds"])}) for case in cases["ill"]]
    cured = counted = 0
    with tempfile.TemporaryDirectory() as folder:
        write_data(Path(folder))
        for ill in ills:
            if fnmatch.fnmatch(ill.name, options.only):
                blame = shown(ill, Path(folder), within_s=options.within)
                counted += blame is not None
                cured += bool(blame)
    print(f"\n{cured} of {counted} cured ({cured / max(counted, 1):.0%})")
    print(f"{len(ills)} configs stand for {len({ill.zoo for ill in ills})} cases of the zoo; ", end="")
    print(f"the faults of {len(cases['in_code'])} are in somebody's code")


def shown(ill: Ill, folder: Path, *, within_s: float) -> bool | None:
    """Return whether a config is cured, or None where it did not get ill; print everything on the way."""
    began = time.perf_counter()
    path = folder / f"{ill.name}.yaml"
    path.write_text(ill.config.replace("FOLDER", str(folder)))
    run = train(load_config(path, [*QUIET, f"run.out={folder}", "train.threads=1"]), log_format="plain").directory
    history = read(run)
    found = {f.kind for f in history.findings if f.severity >= Severity.WARNING}
    print(f"\n{ill.name}: {', '.join(sorted(found)) or 'no finding'}", flush=True)
    if not found & set(ill.kinds):
        print(f"  does not count: expected {' or '.join(ill.kinds)}")
        return None
    diagnoses = diagnose(history)
    print(*(f"  cause: {d.cause} ({d.findings[0].kind})" for d in diagnoses if d.severity > Severity.INFO), sep="\n")
    runner = TrialRunner(run, history, deadline=time.perf_counter() + within_s)
    cure = find_cure(runner, verify(runner, diagnoses))
    if cure is None:
        print(f"  NOT CURED: no cure found, {time.perf_counter() - began:.0f} s")
        return False
    print(*(f"  | {line}" for line in to_yaml(cure, run=run).splitlines() if not line.startswith("#")), sep="\n")
    tried = compare_configs(config_of(run), config_of(run, cure.patch), steps=history.step + 1, seeds=SEEDS, threads=1)
    print(*(f"  {line}" for pair in tried.pairs for line in told(pair)), sep="\n")
    is_cured = all(is_healed(pair, ill, same_loss=tried.same_loss) for pair in tried.pairs)
    print(f"  {'cured' if is_cured else 'NOT CURED'}, {time.perf_counter() - began:.0f} s", flush=True)
    return is_cured


def told(pair: SeedPair) -> Iterator[str]:
    """Yield what became of a seed: findings, loss and accuracy, before and with the cure."""
    for name, made in (("ill", pair.old), ("cured", pair.new)):
        kinds = ", ".join(sorted({f.kind for f in made.alarms})) or "healthy"
        yield (
            f"seed {pair.seed}, {name:<5} loss {made.loss:8.4g}  validation loss {made.val_loss:8.4g}  "
            f"accuracy {made.val_accuracy:6.1%}  {kinds}"
        )


def is_healed(pair: SeedPair, ill: Ill, *, same_loss: bool) -> bool:
    """Say whether the cured training of a seed has no alarm and learns better than the ill one, or as well."""
    old, new = pair.old, pair.new
    if new.alarms or hardly_learns(new) or new.val_accuracy < old.val_accuracy - TOLERANCE:
        return False
    improved = new.val_accuracy > old.val_accuracy
    if same_loss:
        improved |= new.loss < old.loss or new.val_loss < old.val_loss
    return improved or not np.isfinite(old.loss) or not same_loss


def write_data(folder: Path) -> None:
    """Write the tables and images that the cases read."""
    draw = np.random.default_rng(0)
    with np.load(digits.FILE, allow_pickle=False) as arrays:
        images, labels = arrays["images"][:, None].astype(np.float32) / digits.DARKEST, arrays["labels"]
    order = np.argsort(labels, kind="stable")
    np.savez(folder / "sorted.npz", x=images[order], y=labels[order])
    np.savez(folder / "raw.npz", x=np.round(images.reshape(len(images), -1) * 255), y=labels)
    radius, angle = 1 + draw.integers(0, 2, 3000), draw.uniform(0, 2 * np.pi, 3000)
    circles = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1) + draw.normal(0, 0.1, (3000, 2))
    np.savez(folder / "circles.npz", x=circles.astype(np.float32), y=radius)
    x = draw.normal(size=(4000, 10)).astype(np.float32)
    mean = 4 + 3 * x[:, 0] + 2 * x[:, 1] ** 2 + x[:, 2]
    np.savez(folder / "counts.npz", x=x, y=draw.poisson(np.maximum(mean, 0.2)).astype(np.float32))
    scale, centre = np.array([60, 2, 1, 800, 12, 20]), np.array([140, 4, 2, 1500, 1970, 30])
    houses = draw.normal(size=(3000, 6))
    price = houses @ np.array([0.8, 0.2, 0.1, 0.3, 0.4, -0.3]) + 0.3 * draw.normal(size=3000)
    np.savez(folder / "houses.npz", x=(centre + scale * houses).astype(np.float32), y=price.astype(np.float32))
    sick = draw.integers(0, 2, 350)
    cells = draw.normal(size=(350, 30)) + 0.5 * sick[:, None]
    flipped = np.where(draw.random(70) < 0.12, 1 - sick[:70], sick[:70])  # a tenth of the labels is wrong
    np.savez(folder / "tumour.npz", x=cells[:70], y=flipped, u=cells[70:], v=sick[70:])


if __name__ == "__main__":
    main()
