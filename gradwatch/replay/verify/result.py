"""Results of the verification of a diagnosis: experiments, tested causes, and the verification of a finding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, final

from gradwatch.diagnose.causes import CauseId
from gradwatch.records import Finding, Remedy
from gradwatch.replay.locate.bad_operation import Located

Status = Literal["confirmed", "refuted", "open"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """A change and its result.

    Args:
        text: What was different.
        result: The outcome, with numbers.
        gone: Whether the symptom was gone; None if unknown.
        change: The change of the config, where it is one.
        causes: Ids of the causes that it speaks for.
        axis: What it varied: `data`, `state`, `numerics`, `chance`, `mode`, `formula`, `config`; `look`: nothing.
        is_healthy: Whether no other alarm came in its place.
        start_step: Step of the recorded state from which was trained; 0 is the start, None is no training.
    """

    text: str
    result: str
    gone: bool | None
    change: Remedy | None = None
    causes: tuple[CauseId, ...] = ()
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
        cause: Words for the cause.
        cause_id: Its stable name.
        status: `confirmed` if the symptom was gone under one of its changes; `refuted` if it was gone under none;
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
            "cause_id": str(self.cause_id),
            "status": self.status,
            "checks": [c.to_json() for c in self.experiments],
        }


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The verification of one diagnosis.

    Args:
        finding: Its leading finding.
        control: Result without a change, in words.
        reproduced: Whether the symptom appeared again.
        located: The first bad operation, where something was not finite.
        sorted: What the symptom depends on: data, state, numerics or chance, in words.
        causes: The diagnosed cause, then its rivals where they were looked at.
        other_experiments: Experiments that belong to no cause of the table.
        seconds: Time of the verification.
    """

    finding: Finding
    control: str
    reproduced: bool
    located: Located | None
    sorted: str
    causes: tuple[TestedCause, ...]
    other_experiments: tuple[Experiment, ...]
    seconds: float

    @property
    def confirmed(self) -> tuple[Experiment, ...]:
        """The changes of the config under which the symptom was gone, the smallest first."""
        experiments = [c for tested in self.causes for c in tested.experiments] + list(self.other_experiments)
        return tuple(c for c in experiments if c.gone and c.change)

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "finding": self.finding.to_json(),
            "control": self.control,
            "comes_back": self.reproduced,
            "located": self.located.to_json() if self.located else None,
            "sorted": self.sorted,
            "causes": [t.to_json() for t in self.causes],
            "further": [c.to_json() for c in self.other_experiments],
            "seconds": round(self.seconds, 3),
        }
