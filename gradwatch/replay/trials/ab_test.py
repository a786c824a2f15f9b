"""Train an old and a new config from the same seeds, and compare their findings and losses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, final

from gradwatch.config.sections.root import Config
from gradwatch.replay.trials.trial_run import TrialRun, run_trial


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SeedPair:
    """Two trainings from one seed."""

    seed: int
    old: TrialRun
    new: TrialRun

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {"seed": self.seed, "old": _told(self.old), "new": _told(self.new)}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigComparison:
    """An old and a new config, trained side by side.

    Args:
        steps: Optimizer steps of each training.
        pairs: One for each seed.
        same_loss: Whether both minimise the same loss function, so that their losses can be compared.
    """

    steps: int
    pairs: tuple[SeedPair, ...]
    same_loss: bool

    @property
    def resolved(self) -> dict[str, tuple[int, int]]:
        """Kinds of findings of the old config: seeds in which each was made, and of those the ones where it is gone."""
        kinds = dict.fromkeys(f.kind for p in self.pairs for f in p.old.alarms)
        counted = {}
        for kind in kinds:
            ill = [p for p in self.pairs if any(f.kind == kind for f in p.old.alarms)]
            counted[kind] = len(ill), sum(not any(f.kind == kind for f in p.new.alarms) for p in ill)
        return counted

    @property
    def introduced(self) -> dict[str, int]:
        """Kinds of findings that only the new config makes, and in how many seeds."""
        kinds = dict.fromkeys(f.kind for p in self.pairs for f in p.new.alarms)
        return {
            k: sum(any(f.kind == k for f in p.new.alarms) for p in self.pairs) for k in kinds if k not in self.resolved
        }

    @property
    def better(self) -> int:
        """Seeds in which the new config ends better: by validation accuracy, else by loss."""
        return sum(self.is_better(p) for p in self.pairs)

    def is_better(self, pair: SeedPair) -> bool:
        """Return whether the new config ended better from a seed."""
        old, new = pair.old, pair.new
        if not self.same_loss and not math.isnan(new.val_accuracy):
            return new.val_accuracy > old.val_accuracy
        return new.loss < old.loss or (math.isfinite(new.loss) and not math.isfinite(old.loss))

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "steps": self.steps,
            "same_loss": self.same_loss,
            "pairs": [p.to_json() for p in self.pairs],
            "gone": {kind: {"seeds": n, "gone": gone} for kind, (n, gone) in self.resolved.items()},
            "came": self.introduced,
            "better": self.better,
        }


def compare_configs(
    old: Config, new: Config, *, steps: int, seeds: int, threads: int | None = None
) -> ConfigComparison:
    """Train both for some steps, from each of some seeds: the run's own, and those after it.

    Args:
        old: The config as it was.
        new: The changed one.
        steps: Optimizer steps.
        seeds: How many.
        threads: As in `run_trial`.
    """

    def trained(config: Config, seed: int) -> TrialRun:
        return run_trial(_seeded(config, seed), steps=steps, threads=threads)

    every_seed = range(old.run.seed, old.run.seed + seeds)
    pairs = [SeedPair(seed=seed, old=trained(old, seed), new=trained(new, seed)) for seed in every_seed]
    return ConfigComparison(steps=steps, pairs=tuple(pairs), same_loss=old.loss == new.loss)


def _seeded(config: Config, seed: int) -> Config:
    return config.model_copy(update={"run": config.run.model_copy(update={"seed": seed})})


def _told(made: TrialRun) -> dict[str, Any]:
    return {
        "loss": made.loss,
        "val_loss": made.val_loss,
        "val_accuracy": made.val_accuracy,
        "findings": sorted({f.kind for f in made.alarms}),
    }
