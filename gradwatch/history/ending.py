"""Name each kind of ending of a run, with its status in run.json and its sentence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, final, get_args

Status = Literal["running", "finished", "interrupted", "failed"]
Kind = Literal["finished", "early-stop", "non-finite", "critical", "interrupted", "failed", "running", "killed"]

# kind: status in run.json, and the first words of the sentence
_KINDS: Mapping[Kind, tuple[Status, str]] = {
    "finished": ("finished", "finished after"),
    "early-stop": ("finished", "stopped early at"),
    "non-finite": ("failed", "stopped at"),
    "critical": ("failed", "stopped at"),
    "interrupted": ("interrupted", "interrupted at"),
    "failed": ("failed", "failed at"),
    # no run writes these two: a reader sees them in the status and the lock of the directory
    "running": ("running", "in progress at"),
    "killed": ("running", "killed at"),
}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The way in which a run ended.

    Args:
        kind: `finished` (all planned steps), `early-stop` (`train.early_stop`), `non-finite` (`train.on_nonfinite`),
            `critical` (`train.on_critical`), `interrupted` (Ctrl-C or SIGTERM), `failed` (an exception), `running`, or
            `killed` (without an ending of its own).
        reason: Why it ended, such as the error, without a period; empty if `kind` is enough.
    """

    kind: Kind
    reason: str = ""

    @property
    def status(self) -> Status:
        """Status of the run in run.json."""
        return _KINDS[self.kind][0]

    @property
    def word(self) -> str:
        """The status, with `killed` and `early-stop` as their own words, for lists of runs."""
        return self.kind if self.kind in ("early-stop", "killed") else self.status

    def sentence(self, steps: int) -> str:
        """Return how the run ended, such as `stopped early at step 96: val_loss has not improved for 5 evaluations`.

        Args:
            steps: Optimizer steps made.
        """
        verb = _KINDS[self.kind][1]
        if self.kind == "finished":
            text = f"{verb} {steps:,} step{'' if steps == 1 else 's'}"
        else:
            text = f"{verb} step {steps:,}" if steps else f"{verb.removesuffix(' at')} before the first step"
        return f"{text}: {self.reason}" if self.reason else text

    def to_json(self) -> dict[str, str]:
        """Return plain data that `from_json` reads back."""
        return {"kind": self.kind, "reason": self.reason}

    @classmethod
    def from_json(cls, data: Mapping[str, Any] | None, *, status: Status) -> Self:
        """Return the ending from the result of `to_json`, or from the status alone if the two do not fit.

        Args:
            data: The stored ending, or None in a run of an older version.
            status: Status of the run. An older version that continued the run has changed it.
        """
        kind = data["kind"] if data else status
        if kind not in get_args(Kind) or _KINDS[kind][0] != status:  # a kind of a newer version
            return cls(kind=status)
        return cls(kind=kind, reason=str(data["reason"]) if data else "")
