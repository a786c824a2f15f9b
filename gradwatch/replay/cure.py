"""The smallest change of a config that makes a run healthy, found by training with it, and written as YAML."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np

from gradwatch.diagnose.rank import diagnose
from gradwatch.errors import GradwatchError, RunError
from gradwatch.history.disk import atomic
from gradwatch.history.store import History
from gradwatch.records import Diagnosis, Remedy, Severity
from gradwatch.replay.config_change import CONFIG, config_of, is_taken, reverted_settings
from gradwatch.replay.trials.runner import TrialRunner
from gradwatch.replay.trials.trial_run import TrialRun, final_loss
from gradwatch.replay.verify.result import Verification

ROUNDS = 4
"""Changes on top of one another at most: what needs more is another training."""
WIDTH = 3
"""Sets of changes of a round, the best, to which more is added."""
FASTER = (10.0, 100.0, 1000.0)
"""Factors of the learning rate that are tried where a cure learns less than the illness did."""
TOLERANCE = 0.02
"""Validation accuracy that a cure may lose: about what two seeds differ by on a few hundred samples."""
LITTLE = 0.1
"""Fall of the loss, as a fraction, below which a training has hardly learnt: an illness may be gone with all else."""
FIRST = 5
"""Losses of the beginning whose median stands for it."""
NOTHING = (0, 0, 0)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Cure:
    """A change that was trained with for as long as the run.

    Args:
        changes: What it is made of, in the order in which they were added.
        others: Changes under which the finding was gone as well, the smallest first.
        steps: Steps that were trained.
        before: Final training loss of the run as it was.
        after: The same with the cure; of another loss function, where the cure changes that.
        accuracy: Validation accuracy at the end with the cure; nan where there is none.
        left: Kinds of findings that are left; none where it is healthy.
    """

    changes: tuple[Remedy, ...]
    others: tuple[Remedy, ...]
    steps: int
    before: float
    after: float
    accuracy: float
    left: tuple[str, ...]

    @property
    def patch(self) -> dict[str, Any]:
        """All that it sets: dotted keys with their values."""
        return _united(self.changes)

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "patch": self.patch,
            "changes": [{"text": c.text, "patch": dict(c.patch)} for c in self.changes],
            "others": [{"text": c.text, "patch": dict(c.patch)} for c in self.others],
            "steps": self.steps,
            "loss_before": self.before,
            "loss_after": self.after,
            "val_accuracy_after": self.accuracy,
            "findings_left": list(self.left),
        }


def find_cure(runner: TrialRunner, verifications: Sequence[Verification]) -> Cure | None:
    """Return the smallest change with which the whole run is healthy and learns no less, or what comes nearest.

    Each confirmed change is trained with alone, for as long as the run was, and where that is enough from another seed
    as well. Where none is enough, what mends the illness that each leaves is added to it, and so on; at last, what the
    config sets is taken back, one by one.

    Args:
        runner: Trains changed configs of the run.
        verifications: Causes that were confirmed.
    """
    confirmed = sorted((c.change for p in verifications for c in p.confirmed if c.change), key=lambda c: len(c.patch))
    trials: list[_TriedPatch] = []
    wave: Iterable[tuple[Remedy, ...]] = [(c,) for c in confirmed]
    for _ in range(ROUNDS):
        made = list(_try_wave(runner, wave))
        trials += made
        if not made or not _rank(made[-1], runner):
            break
        made.sort(key=lambda t: _rank(t, runner) or NOTHING)
        wave = [more for tried in made[:WIDTH] for more in _extend(runner, tried)]
    if any(p.reproduced for p in verifications) and all(_rank(t, runner) for t in trials):
        back = reverted_settings(config_of(runner.run))
        trials += _try_wave(runner, ((c,) for c in back if c not in confirmed))
    if not trials:
        return None
    best = min(trials, key=lambda t: _rank(t, runner) or NOTHING)
    return Cure(
        changes=best.changes,
        others=tuple(c for c in confirmed if c not in best.changes),
        steps=best.made[0].steps,
        before=final_loss(runner.history),
        after=best.made[0].loss,
        accuracy=best.made[0].val_accuracy,
        left=tuple(sorted({f.kind for made in best.made for f in made.alarms})),
    )


def to_yaml(cure: Cure, *, run: Path, name: str = "cure.yaml") -> str:
    """Return a cure as YAML for `gradwatch train config.yaml --set-file`, the smallest change first, with reasons."""
    told = "healthy" if not cure.left else f"not healthy yet: {', '.join(cure.left)}"
    lines = [
        f"# Fix for {run}: trained {cure.steps:,} steps with it; the run was {told}.",
        f"# Apply it: gradwatch train {run / CONFIG} --set-file {name}",
    ]
    ordered = sorted(cure.changes, key=lambda c: len(c.patch))
    reasons = {key: c.text for c in ordered for key in c.patch}
    lines += _lines(_nested(_united(ordered)), reasons)
    if cure.others:
        lines += ["# Each of these also removed the finding:"]
    for change in cure.others:
        lines += [f"#   {line}" for line in _lines(_nested(change.patch), dict.fromkeys(change.patch, change.text))]
    return "\n".join(lines) + "\n"


def write(cure: Cure, path: Path, *, run: Path) -> None:
    """Write a cure into a file.

    Raises:
        RunError: It cannot be written.
    """
    try:
        atomic.replace(path, to_yaml(cure, run=run, name=str(path)).encode())
    except RunError as error:
        raise RunError(f"--patch: {error}; choose another file") from error


@final
@dataclass(frozen=True, slots=True)
class _TriedPatch:
    """Changes, and the training with them; where it was enough, from another seed as well."""

    changes: tuple[Remedy, ...]
    made: tuple[TrialRun, ...]


def _try_wave(runner: TrialRunner, wave: Iterable[tuple[Remedy, ...]]) -> Iterator[_TriedPatch]:
    """Train with each set of changes that the config takes, up to the first that is enough."""
    for changes in wave:
        try:
            made = _train_patch(runner, _united(changes))
        except (GradwatchError, RuntimeError):
            continue
        if not made:  # out of time
            return
        tried = _TriedPatch(changes, made)
        yield tried
        if not _rank(tried, runner):
            return


def _train_patch(runner: TrialRunner, patch: dict[str, Any]) -> tuple[TrialRun, ...]:
    """Train with a patch, and once more from another seed where it is enough: what only puts off helps one seed."""
    steps, made = runner.history.step + 1, []
    for seed in ({}, {"run.seed": config_of(runner.run).run.seed + 1}):
        made_run = runner.run_trial(patch | seed, steps=steps)
        if made_run is None:
            break
        made.append(made_run)
        if any(_left(made_run, runner.history)):
            break
    return tuple(made)


def _extend(runner: TrialRunner, tried: _TriedPatch) -> Iterator[tuple[Remedy, ...]]:
    """Yield the changes with one more, which the illness that they leave calls for."""
    left = [d for d in diagnose(tried.made[-1].history) if d.severity >= Severity.WARNING]
    more = _remedies(left) if left else _for_learning(runner, tried.made[-1])
    for change in more:
        if change.patch and is_taken(runner.run, change):
            kept = (c for c in tried.changes if not set(c.patch) <= set(change.patch))  # a rate that is raised again
            yield (*kept, change)


def _remedies(diagnoses: Sequence[Diagnosis]) -> Iterator[Remedy]:
    return itertools.chain.from_iterable(d.remedies for d in diagnoses)


def _for_learning(runner: TrialRunner, made: TrialRun) -> Iterator[Remedy]:
    """Yield larger remedies of the illness that there was, then larger steps: the rate may have suited the illness."""
    yield from _remedies([d for d in diagnose(runner.history) if d.severity >= Severity.WARNING])
    for factor in FASTER:
        rate = float(f"{factor * made.history['lr.0'][0]:.1g}")
        yield Remedy(text=f"raise the learning rate to {rate:g}", patch={"optim.lr": rate})


def _rank(tried: _TriedPatch, runner: TrialRunner) -> tuple[int, int, int] | None:
    """Return what is left to mend, from the worse seed; None where nothing is."""
    rank = max(_left(made, runner.history) for made in tried.made)
    return rank if any(rank) else None


def _left(made: TrialRun, history: History) -> tuple[int, int, int]:
    """Return what a training leaves to mend: the gravest finding, how many kinds, and that it learns too little."""
    gravest = max((int(f.severity) for f in made.alarms), default=0)
    too_little = 2 if hardly_learns(made) else int(_learns_less(made, history))
    return gravest, len({f.kind for f in made.alarms}), too_little


def _learns_less(made: TrialRun, history: History) -> bool:
    """Return whether the best accuracy of a training is clearly below the best accuracy of the run."""
    best, run = (_best_accuracy(h) for h in (made.history, history))
    return max(best, made.val_accuracy) < run - TOLERANCE if math.isfinite(run) else False


def _best_accuracy(history: History) -> float:
    """Return the highest validation accuracy that was measured; -inf where none was."""
    accuracy_T = history["val_accuracy"]
    return float(np.max(accuracy_T, initial=-math.inf, where=np.isfinite(accuracy_T)))


def hardly_learns(made: TrialRun) -> bool:
    """Return whether the loss of a training has hardly fallen from its first steps to its end."""
    first = float(np.median(made.history["loss"][:FIRST]))
    return first > 0 and made.loss > (1 - LITTLE) * first


def _united(changes: Iterable[Remedy]) -> dict[str, Any]:
    united: dict[str, Any] = {}
    for change in changes:
        united |= change.patch
    return united


def _nested(patch: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted keys as nested mappings; a whole value stands beside its section's other keys."""
    nested: dict[str, Any] = {}
    for key, value in patch.items():
        *parents, last = key.split(".")
        node = nested
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return nested


def _lines(node: Mapping[str, Any], reasons: Mapping[str, str], above: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the lines of nested mappings, those that set something with the reason behind it."""
    indent = "  " * len(above)
    for key, value in node.items():
        dotted = ".".join((*above, key))
        if isinstance(value, dict) and dotted not in reasons:
            yield f"{indent}{key}:"
            yield from _lines(value, reasons, (*above, key))
        else:
            yield f"{indent}{key}: {json.dumps(value)}  # {reasons[dotted]}"
