"""Hold the digits that a step keeps in each format, with the operations that lose them and the unstable formulas."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, final

from gradwatch.probe.place import NOWHERE, Place
from gradwatch.records import plain, plain_fields

Format = Literal["fp32", "bf16", "fp16"]
Phase = Literal["forward", "backward"]
MAX_SHOWN = 5
"""Operations to print for each format and phase."""
LEAST_LOST = 0.5
"""Minimum number of digits that an operation must lose to be printed."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LostDigits:
    """An operation that loses digits.

    Args:
        operation: Its name in torch, such as `sub`.
        phase: forward or backward.
        module: Path of the module that calls it; empty for the outermost one and outside of all.
        place: Line that calls it; of a backward operation, the line of its forward.
        digits: Decimal digits that are wrong in its result and were right in its arguments.
        given: Relative error of its arguments.
        error: Relative error of its result; infinite if it overflows.
        calls: Number of calls from this line that lose digits.
    """

    operation: str
    phase: Phase
    module: str
    place: Place
    digits: float
    given: float
    error: float
    calls: int

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        data = plain_fields(self)
        return data | {"given_error": data.pop("given")}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """The operation whose result is nearest to the largest number of its format.

    Args:
        place: Operation, module and line.
        top: Largest magnitude of its exact result.
        decades: Powers of ten from there to the largest number of its format; negative if it overflows.
        format: Format of the result.
    """

    place: str
    top: float
    decades: float
    format: str


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FormatReport:
    """The step in one format.

    Args:
        format: fp32, bf16 or fp16.
        is_whole: Whether the model and the batch were converted; else autocast chose the format of each operation.
        digits: Decimal digits of the format.
        loss: Relative error of the loss.
        gradients: Relative error of the gradient of each tensor; nan where the gradient is 0.
        lost: Operations that lose digits, the most first.
        reach: The operation nearest to an overflow, or None.
        flushed: Share of the elements of the gradients that are 0 and should not be.
        loss_scale: Factor of the loss in the backward pass, as of a GradScaler.
        unfollowed: Operations without a float64 form, whose results count as exact.
    """

    format: Format
    is_whole: bool
    digits: float
    loss: float
    gradients: dict[str, float]
    lost: tuple[LostDigits, ...]
    reach: Reach | None
    flushed: float
    loss_scale: float = 1.0
    unfollowed: tuple[str, ...] = ()

    @property
    def worst_gradient(self) -> tuple[str, float]:
        """Return the name and relative error of the gradient with the fewest digits; empty and 0 without any."""
        known = [(n, e) for n, e in self.gradients.items() if not math.isnan(e)]
        return max(known, key=lambda pair: pair[1], default=("", 0.0))

    @property
    def is_finite(self) -> bool:
        """Return whether the loss and every gradient are finite where the exact ones are."""
        return all(e != math.inf for e in (self.loss, *self.gradients.values()))

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "format": self.format,
            "whole": self.is_whole,
            "digits": self.digits,
            "finite": self.is_finite,
            "loss_error": plain(self.loss),
            "loss_scale": self.loss_scale,
            "gradient_errors": plain(self.gradients),
            "flushed": plain(self.flushed),
            "overflow": plain(self.reach),
            "lost": plain(self.lost),
            "unfollowed": [*self.unfollowed],
        }

    def kept(self, error: float) -> float:
        """Return the right decimal digits at a relative error, between 0 and the digits of the format."""
        return min(self.digits, max(0.0, -math.log10(error))) if error else self.digits


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LatentFormula:
    """A formula in the graph of the loss that another form replaces.

    Args:
        text: The weakness of the formula.
        stable: The stable form, as code.
        module: Path of the module that calls it, or empty.
        place: Line of its operation.
    """

    text: str
    stable: str
    module: str = ""
    place: Place = NOWHERE


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """What `gradwatch.precision` returns. Its text is the report that `gradwatch check --precision` prints.

    Args:
        formats: The step in each format.
        formulas: Unstable formulas, the likeliest culprit of a NaN first.
        seconds: How long it took.
        notes: Further remarks.
    """

    formats: tuple[FormatReport, ...]
    formulas: tuple[LatentFormula, ...]
    seconds: float
    notes: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> FormatReport:
        return next(report for report in self.formats if report.format == name)

    def to_json(self) -> dict[str, Any]:
        """Return plain data; numbers that are not finite become None."""
        return plain_fields(self)

    def __str__(self) -> str:
        lines = ["digits of the step, next to the same operations in float64"]
        for report in self.formats:
            lines += _format_lines(report)
        for formula in self.formulas:
            lines.append(f"  unstable: {located(formula.text, formula.module, formula.place)}")
            lines += [f"      {formula.place.text}"] if formula.place.text else []
            lines.append(f"      use {formula.stable}")
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


def located(what: str, module: str, place: Place) -> str:
    """Return an operation or a formula with its module and line, for display."""
    return what + (f" in `{module}`" if module else "") + (f" ({place})" if place else "")


def _format_lines(report: FormatReport) -> list[str]:
    """Return the lines of one format."""
    name, error = report.worst_gradient
    how = "whole model" if report.is_whole else "" if report.format == "fp32" else "autocast"
    scaled = f", loss times {report.loss_scale:g}" if report.loss_scale != 1 else ""
    lines = [f"  {report.format}{f' ({how}{scaled})' if how else ''}"]
    loss = "not finite" if report.loss == math.inf else f"{report.kept(report.loss):.1f} of {report.digits:.1f} digits"
    worst = "not finite" if error == math.inf else f"{report.kept(error):.1f} digits"
    lines.append(f"    loss {loss}" + (f"; gradients at least {worst} (`{name}`)" if name else ""))
    if report.reach is not None:
        r = report.reach
        far = f"{r.decades:.1f} powers of ten below" if r.decades > 0 else "beyond"
        lines.append(f"    largest value {r.top:.3g}, {far} the end of {r.format}: {r.place}")
    if report.flushed >= 5e-4:
        lines.append(f"    {100 * report.flushed:.1f} % of the gradient elements are rounded to 0")
    for phase in ("forward", "backward"):
        of_phase = [o for o in report.lost if o.phase == phase]
        for o in of_phase[:MAX_SHOWN]:
            calls = f", {o.calls} calls" if o.calls > 1 else ""
            lines.append(f"    {phase:<8}  {_loss_of(o)}: {located(o.operation, o.module, o.place)}{calls}")
            lines += [f"                  {o.place.text}"] if o.place.text else []
        rest = len(of_phase) - MAX_SHOWN
        lines += [f"    {phase:<8}  ... and {rest} more"] if rest > 0 else []
    if not report.lost:
        lines.append(f"    no operation loses {LEAST_LOST} digits or more")
    if report.unfollowed:
        lines.append(f"    considered exact, since they have no float64: {', '.join(report.unfollowed)}")
    return lines


def _loss_of(lost: LostDigits) -> str:
    return "not finite" if lost.error == math.inf else f"{lost.digits:.1f} digits lost"
