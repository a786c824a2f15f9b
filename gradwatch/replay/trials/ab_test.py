"""Train an old and a new config from the same seeds, and compare their findings and losses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, final

from gradwatch.config.sections.root import Config
from gradwatch.replay.trials.runner import Progress, no_progress
from gradwatch.replay.trials.trial_run import TrialRun, run_trial


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SeedPair:
    """The trainings of both configs from one seed."""

    seed: int
    old: TrialRun
    new: TrialRun

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {"seed": self.seed, "old": _outcome(self.old), "new": _outcome(self.new)}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigComparison:
    """The trainings of an old and a new config from the same seeds.

    Args:
        steps: Optimizer steps of each training.
        pairs: Both trainings for each seed.
        same_loss: Whether both configs minimize the same loss function, so that their losses are comparable.
    """

    steps: int
    pairs: tuple[SeedPair, ...]
    same_loss: bool

    @property
    def resolved(self) -> dict[str, tuple[int, int]]:
        """By kind of the old config's findings: number of seeds with the kind, and number of seeds that lose it."""
        # a dict keeps the order of the findings, which a set would not
        kinds = dict.fromkeys(f.kind for p in self.pairs for f in p.old.alarms)
        counted = {}
        for kind in kinds:
            affected = [p for p in self.pairs if any(f.kind == kind for f in p.old.alarms)]
            counted[kind] = len(affected), sum(not any(f.kind == kind for f in p.new.alarms) for p in affected)
        return counted

    @property
    def introduced(self) -> dict[str, int]:
        """Kinds of findings that only the new config has, with the number of seeds."""
        kinds = dict.fromkeys(f.kind for p in self.pairs for f in p.new.alarms)
        # not introduced if the old config has the kind in any seed
        return {
            k: sum(any(f.kind == k for f in p.new.alarms) for p in self.pairs) for k in kinds if k not in self.resolved
        }

    @property
    def better(self) -> int:
        """Number of seeds in which the new config ends better."""
        return sum(self.is_better(p) for p in self.pairs)

    def is_better(self, pair: SeedPair) -> bool:
        """Return whether the new config ended better from a seed."""
        old, new = pair.old, pair.new
        # different loss functions have no common scale; accuracy is comparable, if there is a validation set
        if not self.same_loss and not math.isnan(new.val_accuracy):
            return new.val_accuracy > old.val_accuracy
        # a comparison with nan is false, so a finite loss after nan is tested separately
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
    old: Config, new: Config, *, steps: int, seeds: int, threads: int | None = None, progress: Progress = no_progress
) -> ConfigComparison:
    """Train both configs from several seeds: the seed of the old config, and the numbers that follow it.

    Args:
        old: The original config.
        new: The changed config.
        steps: Optimizer steps of each training.
        seeds: Number of seeds.
        threads: Number of threads, as in `run_trial`.
        progress: Shows which config is trained.
    """

    def trained(config: Config, seed: int) -> TrialRun:
        name = "the original config" if config is old else "the change"
        progress(f"comparing {steps:,} steps with seed {seed}: {name}")
        return run_trial(_seeded(config, seed), steps=steps, threads=threads)

    # both configs train from the same seeds, so that each pair differs only in the config
    every_seed = range(old.run.seed, old.run.seed + seeds)
    pairs = [SeedPair(seed=seed, old=trained(old, seed), new=trained(new, seed)) for seed in every_seed]
    return ConfigComparison(steps=steps, pairs=tuple(pairs), same_loss=old.loss == new.loss)


def _seeded(config: Config, seed: int) -> Config:
    return config.model_copy(update={"run": config.run.model_copy(update={"seed": seed})})


def _outcome(made: TrialRun) -> dict[str, Any]:
    return {
        "loss": made.loss,
        "val_loss": made.val_loss,
        "val_accuracy": made.val_accuracy,
        "findings": sorted({f.kind for f in made.alarms}),
    }
