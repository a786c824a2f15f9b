"""What `gradwatch diagnose` does with --verify, --patch and --try: run again with changes, and write the cure."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from rich.console import Console

if TYPE_CHECKING:
    from gradwatch.history.store import History
    from gradwatch.records import Diagnosis
    from gradwatch.replay.cure import Cure
    from gradwatch.replay.trials.ab_test import Attempt
    from gradwatch.replay.verify.result import Proof


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What is asked for beside the diagnosis.

    Args:
        verify: Prove the causes.
        within_s: Seconds after which no further training is begun.
        patch: File to write the cure into, or None.
        steps: Steps to try the cure for, or None.
        seeds: From how many seeds.
        change: File with a change to try in the place of the cure, or None.
    """

    verify: bool
    within_s: float
    patch: Path | None
    steps: int | None
    seeds: int
    change: Path | None

    @property
    def is_any(self) -> bool:
        """Whether anything is asked for."""
        return self.verify or self.patch is not None or self.steps is not None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of it."""

    run: Path
    wish: Wish
    proofs: tuple[Proof, ...]
    cure: Cure | None
    attempt: Attempt | None

    def to_json(self) -> dict[str, Any]:
        """Return plain data, keys to add to those of a diagnosis."""
        return {
            "proofs": [p.to_json() for p in self.proofs],
            "cure": self.cure.to_json() if self.cure else None,
            "attempt": self.attempt.to_json() if self.attempt else None,
        }

    def show(self, console: Console) -> None:
        """Print it."""
        from gradwatch.cli.output import verification
        from gradwatch.replay.cure import to_yaml

        verification.print_proofs(console, self.proofs)
        if self.wish.verify and not self.proofs:
            console.print("nothing to prove: no finding is graver than info")
        if self.proofs:
            text = to_yaml(self.cure, run=self.run) if self.cure else ""
            verification.print_cure(console, self.cure, text, path=self.wish.patch if self.cure else None)
        if self.attempt:
            verification.print_attempt(console, self.attempt)


def prove(run: Path, history: History, diagnoses: Sequence[Diagnosis], wish: Wish) -> Answer:
    """Do what is wished for. Nothing in the run directory changes, unless the patch is to be written there.

    Raises:
        GradwatchError: The run cannot be trained again, or there is nothing to try or to write.
    """
    from gradwatch.config.load import load_config
    from gradwatch.errors import GradwatchError
    from gradwatch.replay import cure as curing
    from gradwatch.replay.config_change import config_of
    from gradwatch.replay.trials.ab_test import attempt
    from gradwatch.replay.trials.runner import Theatre
    from gradwatch.replay.verify.verify import verify

    old = config_of(run)
    theatre = Theatre(run, history, deadline=time.perf_counter() + wish.within_s)
    proofs: tuple[Proof, ...] = ()
    cure = None
    if wish.verify or wish.patch or not wish.change:
        proofs = verify(theatre, diagnoses)
        cure = curing.find_cure(theatre, proofs)
    if wish.patch and cure:
        curing.write(cure, wish.patch, run=run)
    tried = None
    if wish.steps is not None:
        if wish.change:
            new = load_config(run / "config.yaml", changes=[wish.change])
        elif cure:
            new = config_of(run, cure.patch)
        else:
            raise GradwatchError(
                f"--try: no cure was found for {run} that its config can express; name a change with --with FILE"
            )
        tried = attempt(old, new, steps=wish.steps, seeds=wish.seeds, threads=theatre.threads)
    return Answer(run=run, wish=wish, proofs=proofs, cure=cure, attempt=tried)
