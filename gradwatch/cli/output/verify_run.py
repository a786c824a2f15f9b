"""Run `gradwatch diagnose` with --verify, --patch or --try: train again with changes, and write the cure."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from rich.console import Console

from gradwatch.paths import RUN_CONFIG

if TYPE_CHECKING:
    from gradwatch.history.store import History
    from gradwatch.records import Diagnosis
    from gradwatch.replay.cure import Cure
    from gradwatch.replay.trials.ab_test import ConfigComparison
    from gradwatch.replay.trials.runner import Progress
    from gradwatch.replay.verify.result import Verification


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """Tasks of `diagnose` in addition to the diagnosis.

    Args:
        verify: Verify the causes.
        within_s: Time budget in seconds, after which no training starts.
        patch: File to write the cure into, or None.
        steps: Steps to compare the cure for, or None.
        seeds: Number of seeds to compare.
        change: File with a change to compare instead of the cure, or None.
    """

    verify: bool
    within_s: float
    patch: Path | None
    steps: int | None
    seeds: int
    change: Path | None

    @property
    def is_any(self) -> bool:
        """Whether any of these tasks is requested."""
        return self.verify or self.patch is not None or self.steps is not None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """Results of the trainings with changes."""

    run: Path
    options: VerifyOptions
    verifications: tuple[Verification, ...]
    cure: Cure | None
    comparison: ConfigComparison | None

    def mark_remedies(self, diagnoses: Sequence[Diagnosis]) -> tuple[Diagnosis, ...]:
        """Return diagnoses whose tested remedies say whether they cure the run."""
        made = {verification.finding: verification for verification in self.verifications}
        return tuple(made[d.findings[0]].mark_remedies(d) if d.findings[0] in made else d for d in diagnoses)

    def to_json(self) -> dict[str, Any]:
        """Return plain data to add to the JSON of a diagnosis."""
        return {
            "proofs": [p.to_json() for p in self.verifications],
            "cure": self.cure.to_json() if self.cure else None,
            "attempt": self.comparison.to_json() if self.comparison else None,
        }

    def show(self, console: Console) -> None:
        """Print the report."""
        from gradwatch.cli.output import verification
        from gradwatch.replay.cure import to_yaml

        verification.print_verifications(console, self.verifications)
        if self.options.verify and not self.verifications:
            console.print("nothing to verify: all findings are info")
        if self.verifications:
            text = to_yaml(self.cure, run=self.run) if self.cure else ""
            verification.print_cure(console, self.cure, text, path=self.options.patch if self.cure else None)
        if self.comparison:
            verification.print_comparison(console, self.comparison)


def verify_run(
    run: Path, history: History, diagnoses: Sequence[Diagnosis], options: VerifyOptions, *, progress: Progress
) -> VerifyReport:
    """Train again as the options say. The run directory does not change, unless the patch is written to it.

    Args:
        run: The run directory.
        history: Recorded history of the run.
        diagnoses: Diagnoses of its findings.
        options: What to do.
        progress: Shows the trial in progress.

    Raises:
        GradwatchError: The run cannot be trained again, or there is no change to compare.
    """
    from gradwatch.config.load import load_config
    from gradwatch.errors import GradwatchError
    from gradwatch.replay import cure as curing
    from gradwatch.replay.config_change import config_of
    from gradwatch.replay.trials.ab_test import compare_configs
    from gradwatch.replay.trials.runner import TrialRunner
    from gradwatch.replay.verify.verify import verify

    old = config_of(run)
    runner = TrialRunner(run, history, deadline=time.perf_counter() + options.within_s, progress=progress)
    verifications: tuple[Verification, ...] = ()
    cure = None
    # --try without --with compares the cure, which only a verification finds
    if options.verify or options.patch or not options.change:
        verifications = verify(runner, diagnoses)
        cure = curing.find_cure(runner, verifications)
    if options.patch and cure:
        curing.write(cure, options.patch, run=run)
    tried = None
    if options.steps is not None:
        if options.change:
            new = load_config(run / RUN_CONFIG, changes=[options.change])
        elif cure:
            new = config_of(run, cure.patch)
        else:
            raise GradwatchError(
                f"--try: found no change of the config that cures {run}; name a change with --with FILE"
            )
        tried = compare_configs(
            old, new, steps=options.steps, seeds=options.seeds, threads=runner.threads, progress=progress
        )
    return VerifyReport(run=run, options=options, verifications=verifications, cure=cure, comparison=tried)
