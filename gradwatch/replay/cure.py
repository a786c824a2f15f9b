"""Find the smallest config change that makes a run healthy, by training with it, and write it as YAML."""

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
from gradwatch.paths import RUN_CONFIG
from gradwatch.records import Diagnosis, Remedy, Severity
from gradwatch.render.common.config_patch import nested
from gradwatch.replay.config_change import config_of, is_taken, reverted_settings
from gradwatch.replay.trials.runner import TrialRunner
from gradwatch.replay.trials.trial_run import TrialRun, final_loss
from gradwatch.replay.verify.result import Verification

MAX_ROUNDS = 4
"""Maximum number of combined changes: a config that needs more changes describes another training."""
BEAM_WIDTH = 3
"""Number of best sets of changes in a round that are extended in the next round."""
FASTER = (10.0, 100.0, 1000.0)
"""Factors of the learning rate to try if a cure learns less than the original run."""
TOLERANCE = 0.02
"""Validation accuracy that a cure may lose: about the difference of two seeds on a few hundred samples."""
MIN_DECREASE_FRAC = 0.1
"""Minimum decrease of the loss, as a fraction. A training that barely learns may have no findings for that reason."""
FIRST_LOSSES = 5
"""Number of first losses to take the median of, as the loss at the beginning."""
NOTHING = (0, 0, 0)  # rank of a cure that leaves no problem


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Cure:
    """A change that was tested by a training as long as the run.

    Args:
        changes: Single changes of the cure, in the order in which they were added.
        others: Further changes that also removed the finding, the smallest first.
        steps: Number of steps trained with the cure.
        before: Final training loss of the original run.
        after: Final training loss with the cure; not comparable to `before` if the cure changes the loss function.
        accuracy: Final validation accuracy with the cure; nan without validation labels.
        left: Kinds of the remaining findings; empty if the training is healthy.
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
        """Settings of the cure: dotted keys with their values."""
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
    """Find the smallest change with which the whole run is healthy and learns no less, or the nearest change.

    Each confirmed change is tested alone, in a training as long as the run. If the training is healthy, the change is
    tested with another seed as well. If no change is sufficient, the best ones are extended by remedies for the
    remaining findings, for several rounds. Finally, the settings of the config are reverted one by one.

    Args:
        runner: Trains changed configs of the run.
        verifications: Verifications of the diagnoses, with the confirmed changes.

    Returns:
        The cure, or None if no change was trained.
    """
    confirmed = sorted((c.change for p in verifications for c in p.confirmed if c.change), key=lambda c: len(c.patch))
    trials: list[_TriedPatch] = []
    wave: Iterable[tuple[Remedy, ...]] = [(c,) for c in confirmed]
    for _ in range(MAX_ROUNDS):
        made = list(_try_wave(runner, wave))
        trials += made
        # a wave ends at its first sufficient set, so only the last one can be sufficient
        if not made or not _rank(made[-1], runner):
            break
        made.sort(key=lambda t: _rank(t, runner) or NOTHING)
        wave = [more for tried in made[:BEAM_WIDTH] for more in _extend(runner, tried)]
    # a symptom that cannot be reproduced cannot be seen to disappear
    if any(p.reproduced for p in verifications) and all(_rank(t, runner) for t in trials):
        back = reverted_settings(config_of(runner.run))
        trials += _try_wave(runner, ((c,) for c in back if c not in confirmed))
    if not trials:
        return None
    best = min(trials, key=lambda t: _rank(t, runner) or NOTHING)
    # the numbers of the run's own seed, for a fair comparison; the findings of both seeds
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
    """Format a cure as YAML for `gradwatch train config.yaml --set-file`, the smallest change first, with reasons."""
    outcome = "healthy" if not cure.left else f"not healthy yet: {', '.join(cure.left)}"
    lines = [
        f"# Fix for {run}: trained {cure.steps:,} steps with it; the run was {outcome}.",
        f"# Apply it: gradwatch train {run / RUN_CONFIG} --set-file {name}",
    ]
    ordered = sorted(cure.changes, key=lambda c: len(c.patch))
    reasons = {key: c.text for c in ordered for key in c.patch}
    lines += _lines(nested(_united(ordered)), reasons)
    # as comments: together with the cure they would change more than needed
    if cure.others:
        lines += ["# Each of these also removed the finding:"]
    for change in cure.others:
        lines += [f"#   {line}" for line in _lines(nested(change.patch), dict.fromkeys(change.patch, change.text))]
    return "\n".join(lines) + "\n"


def write(cure: Cure, path: Path, *, run: Path) -> None:
    """Write a cure to a file.

    Raises:
        RunError: The file cannot be written.
    """
    try:
        atomic.replace(path, to_yaml(cure, run=run, name=str(path)).encode())
    except RunError as error:
        raise RunError(f"--patch: {error}; choose another file") from error


@final
@dataclass(frozen=True, slots=True)
class _TriedPatch:
    """A set of changes and its training; if that was healthy, also the training with another seed."""

    changes: tuple[Remedy, ...]
    made: tuple[TrialRun, ...]


def _try_wave(runner: TrialRunner, wave: Iterable[tuple[Remedy, ...]]) -> Iterator[_TriedPatch]:
    """Train with each set of changes that the config accepts, up to the first sufficient set."""
    sets = list(wave)
    for i, changes in enumerate(sets):
        runner.progress(f"testing fix {i + 1} of {len(sets)}: {' + '.join(c.text for c in changes)}")
        try:
            made = _train_patch(runner, _united(changes))
        except (GradwatchError, RuntimeError):  # a combination that the config or the model does not accept
            continue
        if not made:  # out of time
            return
        tried = _TriedPatch(changes, made)
        yield tried
        if not _rank(tried, runner):
            return


def _train_patch(runner: TrialRunner, patch: dict[str, Any]) -> tuple[TrialRun, ...]:
    """Train with a patch, and if that is healthy, train with another seed as well.

    A patch that only delays the symptom may help the run's own seed by chance.
    """
    steps, made = runner.history.step + 1, []
    for seed in ({}, {"run.seed": config_of(runner.run).run.seed + 1}):
        made_run = runner.run_trial(patch | seed, steps=steps)
        if made_run is None:  # out of time
            break
        made.append(made_run)
        if any(_left(made_run, runner.history)):  # not sufficient: a second seed costs time and cannot change that
            break
    return tuple(made)


def _extend(runner: TrialRunner, tried: _TriedPatch) -> Iterator[tuple[Remedy, ...]]:
    """Yield the changes extended by one remedy each, for the remaining findings or the lack of learning."""
    left = [d for d in diagnose(tried.made[-1].history) if d.severity >= Severity.WARNING]
    more = _remedies(left) if left else _for_learning(runner, tried.made[-1])
    for change in more:
        if change.patch and is_taken(runner.run, change):
            # dropped if the new change overrides all of its keys, such as a learning rate that is raised again
            kept = (c for c in tried.changes if not set(c.patch) <= set(change.patch))
            yield (*kept, change)


def _remedies(diagnoses: Sequence[Diagnosis]) -> Iterator[Remedy]:
    return itertools.chain.from_iterable(d.remedies for d in diagnoses)


def _for_learning(runner: TrialRunner, made: TrialRun) -> Iterator[Remedy]:
    """Yield further remedies for the findings of the run, then higher learning rates.

    The original learning rate may have been chosen to suit the problem.
    """
    yield from _remedies([d for d in diagnose(runner.history) if d.severity >= Severity.WARNING])
    for factor in FASTER:
        rate = float(f"{factor * made.history['lr.0'][0]:.1g}")
        yield Remedy(text=f"raise the learning rate to {rate:g}", patch={"optim.lr": rate})


def _rank(tried: _TriedPatch, runner: TrialRunner) -> tuple[int, int, int] | None:
    """Return the remaining problems of the worse seed as a rank; None if there are none."""
    rank = max(_left(made, runner.history) for made in tried.made)
    return rank if any(rank) else None


def _left(made: TrialRun, history: History) -> tuple[int, int, int]:
    """Return the remaining problems of a training: highest severity, number of kinds, and lack of learning (0 to 2)."""
    worst = max((int(f.severity) for f in made.alarms), default=0)
    too_little = 2 if hardly_learns(made) else int(_learns_less(made, history))
    return worst, len({f.kind for f in made.alarms}), too_little


def _learns_less(made: TrialRun, history: History) -> bool:
    # the best, not the last: the accuracy of a failing run may collapse before its end
    best, run = (_best_accuracy(h) for h in (made.history, history))
    return max(best, made.val_accuracy) < run - TOLERANCE if math.isfinite(run) else False


def _best_accuracy(history: History) -> float:
    accuracy_T = history["val_accuracy"]
    return float(np.max(accuracy_T, initial=-math.inf, where=np.isfinite(accuracy_T)))


def hardly_learns(made: TrialRun) -> bool:
    """Return whether the loss of a training fell by less than `MIN_DECREASE_FRAC` from its first steps to its end."""
    first = float(np.median(made.history["loss"][:FIRST_LOSSES]))
    # a fraction of a loss at or below 0 says nothing about its decrease
    return first > 0 and made.loss > (1 - MIN_DECREASE_FRAC) * first


def _united(changes: Iterable[Remedy]) -> dict[str, Any]:
    united: dict[str, Any] = {}
    for change in changes:
        united |= change.patch
    return united


def _lines(node: Mapping[str, Any], reasons: Mapping[str, str], above: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the YAML lines of nested mappings; each line with a value ends with its reason as a comment."""
    indent = "  " * len(above)
    for key, value in node.items():
        dotted = ".".join((*above, key))
        # a mapping with a reason is a value of the patch, and is written on one line
        if isinstance(value, dict) and dotted not in reasons:
            yield f"{indent}{key}:"
            yield from _lines(value, reasons, (*above, key))
        else:
            yield f"{indent}{key}: {json.dumps(value)}  # {reasons[dotted]}"
