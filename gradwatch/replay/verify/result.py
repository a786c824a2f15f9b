"""Hold the results of verifying a diagnosis: experiments, tested causes, and the verification of a finding."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, final

from gradwatch.records import Diagnosis, Finding, Remedy
from gradwatch.replay.locate.bad_operation import Located

Status = Literal["confirmed", "refuted", "open"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """A change and its result.

    Args:
        text: Description of the change.
        result: The outcome, with numbers.
        gone: Whether the symptom was gone; None if unknown.
        change: The config change; None for other changes.
        causes: Ids of the causes that the experiment supports if the symptom is gone.
        axis: Factor that was varied: `data`, `state`, `numerics`, `chance`, `mode`, `formula` or `config`. `look` is a
            check without a change.
        is_healthy: Whether the training had no findings of severity WARNING or higher.
        start_step: Step at which the training began: 0, or the step of a recorded state; None without a training.
    """

    text: str
    result: str
    gone: bool | None
    change: Remedy | None = None
    causes: tuple[str, ...] = ()
    axis: str = "config"
    is_healthy: bool = True
    start_step: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        patch = dict(self.change.patch) if self.change else None
        return {
            "change": self.text,
            "result": self.result,
            "gone": self.gone,
            "axis": self.axis,
            "patch": patch,
            "began_at": self.start_step,
        }


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TestedCause:
    """A cause and the experiments that test it.

    Args:
        cause: Description of the cause.
        cause_id: Stable id of the cause.
        status: `confirmed` if the symptom was gone with one of the changes; `refuted` if it was gone with none;
            `open` if there was no change to try, or the symptom cannot be reproduced.
        experiments: The experiments.
    """

    cause: str
    cause_id: str
    status: Status
    experiments: tuple[Experiment, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "cause": self.cause,
            "cause_id": self.cause_id,
            "status": self.status,
            "checks": [c.to_json() for c in self.experiments],
        }


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The verification of one diagnosis.

    Args:
        finding: Leading finding of the diagnosis.
        control: Result without a change, in words.
        reproduced: Whether the symptom appeared again.
        located: The first bad operation, if a value was not finite.
        dependence: Factors that the symptom depends on, in words: data, state, numerics or chance.
        causes: The diagnosed cause, then the rivals that were tested.
        other_experiments: Experiments that belong to none of the tested causes.
        seconds: Duration of the verification in seconds.
    """

    finding: Finding
    control: str
    reproduced: bool
    located: Located | None
    dependence: str
    causes: tuple[TestedCause, ...]
    other_experiments: tuple[Experiment, ...]
    seconds: float

    @property
    def confirmed(self) -> tuple[Experiment, ...]:
        """Config changes with which the symptom was gone: the changes of the tested causes, then the others."""
        experiments = [c for tested in self.causes for c in tested.experiments] + list(self.other_experiments)
        return tuple(c for c in experiments if c.gone and c.change)

    def mark_remedies(self, diagnosis: Diagnosis) -> Diagnosis:
        """Return the verified diagnosis with the result of each remedy that was tested, those that cure first."""
        tested = {repr(c.change.patch): c.gone for t in self.causes for c in t.experiments if c.change}
        marked = [replace(r, cures=tested.get(repr(r.patch)) if r.patch else None) for r in diagnosis.remedies]
        # stable: remedies with the same result keep their order
        marked.sort(key=lambda r: (r.cures is False, r.cures is None))
        return replace(diagnosis, remedies=tuple(marked))

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "finding": self.finding.to_json(),
            "control": self.control,
            "comes_back": self.reproduced,
            "located": self.located.to_json() if self.located else None,
            "sorted": self.dependence,
            "causes": [t.to_json() for t in self.causes],
            "further": [c.to_json() for c in self.other_experiments],
            "seconds": round(self.seconds, 3),
        }
